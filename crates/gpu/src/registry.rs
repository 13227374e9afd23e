//! The kernels, and the instances of them that plans use most.

use crate::codecs::hadamard_order;
use crate::encoding;
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::rotation::hadamard;
use crate::kernels::{cache, decode, encode, merge, prefill};
use crate::shape::HEAD_DIMS;
use crate::tile::{MAX_PREFILL_DIM, PortableTile};
use crate::variant::Variant;
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::{Generic, Instance, Kernel};

/// Every kernel of attention, and those that fill, copy and read caches.
pub static KERNELS: &[&Kernel] = &[
    &decode::decode::KERNEL,
    &merge::merge::KERNEL,
    &prefill::prefill::KERNEL,
    &encode::encode::KERNEL,
    &encode::append::KERNEL,
    &cache::copy_rows::KERNEL,
    &cache::read_codes::KERNEL,
    &cache::read_elements::KERNEL,
    &hadamard::KERNEL,
    &mask_tiles::KERNEL,
];

/// Instances of every kernel over [`HEAD_DIMS`], types and codecs.
#[must_use]
pub fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for dim in HEAD_DIMS {
        for codec in Codec::ALL.into_iter().filter(|codec| codec.supports(dim)) {
            let variant = Variant {
                dtype: codec.dtype().unwrap_or(Dtype::F16),
                head_dim: dim,
                value_dim: dim,
                k_codec: codec,
                v_codec: codec,
            };
            all.extend(variant.attend(PortableTile::default_decode(codec, dim)));
            all.extend(variant.merge());
            if matches!(codec.dtype(), Some(Dtype::F16 | Dtype::BF16)) && dim <= MAX_PREFILL_DIM {
                all.extend(variant.attend(PortableTile::default_prefill(dim)));
            }
            for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                let generics = encoding::encode_generics(codec, dtype, dim);
                match codec.dtype() {
                    None => {
                        all.extend(encode::encode::specialise(&generics));
                        all.extend(cache::read_codes::specialise(&generics));
                    }
                    Some(_) => {
                        all.extend(encode::append::specialise(&generics));
                        all.extend(cache::read_elements::specialise(&generics));
                    }
                }
            }
            if hadamard_order(codec, dim) > 0 {
                all.extend(hadamard::specialise(&[Generic::Usize(dim)]));
            }
        }
    }
    all.extend(cache::copy_rows::specialise(&[]));
    all.extend(mask_tiles::specialise(&[]));
    all.sort_by_key(Instance::entry);
    all.dedup_by_key(|instance| instance.entry());
    all
}
