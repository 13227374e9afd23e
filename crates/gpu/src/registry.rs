//! The kernels, and the instances of them that plans use most.

use crate::codecs::hadamard_order;
use crate::encoding;
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::rotation::hadamard;
use crate::kernels::{decode, encode, merge};
use crate::plan::{Tile, decode_instance, merge_instance};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::{Generic, Instance, Kernel};

/// Every kernel.
pub static KERNELS: &[&Kernel] = &[
    &decode::decode::KERNEL,
    &merge::merge::KERNEL,
    &encode::encode::KERNEL,
    &encode::append::KERNEL,
    &hadamard::KERNEL,
    &mask_tiles::KERNEL,
];

/// Head dimensions that instances are listed for.
pub const HEAD_DIMS: [usize; 7] = [64, 80, 96, 128, 192, 256, 512];

/// Instances of every kernel over [`HEAD_DIMS`], types and codecs, with rows that are at multiples of 16 bytes.
#[must_use]
pub fn instances() -> Vec<Instance> {
    let mut all = Vec::new();
    for dim in HEAD_DIMS {
        for codec in Codec::ALL.into_iter().filter(|codec| codec.supports(dim)) {
            let q = codec.dtype().unwrap_or(Dtype::F16);
            for paged in [false, true] {
                all.extend(decode_instance(q, [codec; 2], [dim; 2], [16; 2], Tile::of(codec, dim), paged));
            }
            all.extend(merge_instance(q, codec, dim));
            for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
                let generics = encoding::encode_generics(codec, dtype, dim);
                all.extend(match codec.dtype() {
                    None => encode::encode::specialise(&generics),
                    Some(_) => encode::append::specialise(&generics),
                });
            }
            let order = hadamard_order(codec, dim);
            if order > 0 {
                all.extend(hadamard::specialise(&[Generic::Usize(dim), Generic::U32(order)]));
            }
        }
    }
    all.extend(mask_tiles::specialise(&[]));
    all.sort_by_key(Instance::entry);
    all.dedup_by_key(|instance| instance.entry());
    all
}
