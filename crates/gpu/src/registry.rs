//! The kernels, and the instances of them that plans use most.

use crate::backward::tile::{BackwardTile, BackwardVariant};
use crate::codecs::hadamard_order;
use crate::encoding;
use crate::kernels::backward::{d_bias, d_kv, d_q, row_terms, sum_rows};
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::rotation::hadamard;
use crate::kernels::{cache, decode, encode, merge, prefill};
use crate::machines::M1;
use crate::tile::PortableTile;
use crate::variant::{HEAD_DIMS, Variant, VariantError, VariantOption};
use flashtile_core::codec::Codec;
use flashtile_core::dtype::Dtype;
use flashtile_core::limits::MAX_HEAD_DIM;
use flashtile_kernel::{Generic, Instance, Kernel};

/// Every kernel of attention and of its backward pass, and those that fill, copy and read caches.
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
    &row_terms::row_terms::KERNEL,
    &d_q::backward_q::KERNEL,
    &d_kv::backward_kv::KERNEL,
    &d_bias::backward_bias::KERNEL,
    &sum_rows::sum_rows::KERNEL,
];

/// The instance of a kernel of this library, with the tile that plans take where the kernel has one.
///
/// # Errors
/// [`VariantError`].
pub fn instance_of(variant: &Variant, kernel: &Kernel) -> Result<Instance, VariantError> {
    check(variant, kernel)?;
    let made = match kernel.name {
        "decode" => PortableTile::default_decode(variant.k_codec, variant.head_dim).instance(variant),
        "prefill" => PortableTile::default_prefill(variant.head_dim.max(variant.value_dim)).instance(variant),
        "encode" | "append" | "read_codes" | "read_elements" => {
            let codes = variant.k_codec.dtype().is_none();
            if codes != matches!(kernel.name, "encode" | "read_codes") {
                return Err(VariantError::Stored { codec: variant.k_codec, codes: !codes });
            }
            let generics = encoding::encode_generics(variant.k_codec, variant.dtype, variant.head_dim);
            match kernel.name {
                "encode" => encode::encode::specialise(&generics),
                "append" => encode::append::specialise(&generics),
                "read_codes" => cache::read_codes::specialise(&generics),
                _ => cache::read_elements::specialise(&generics),
            }
        }
        "copy_rows" => cache::copy_rows::specialise(&[]),
        "merge" => variant.merge(),
        "hadamard" => hadamard::specialise(&[Generic::Usize(variant.head_dim)]),
        "mask_tiles" => mask_tiles::specialise(&[]),
        _ => {
            let tile = BackwardTile::default_of(&backward(variant));
            return backward_instance(variant, kernel.name, tile.ok());
        }
    };
    made.map_err(VariantError::Generics)
}

fn backward(variant: &Variant) -> BackwardVariant {
    let Variant { dtype, head_dim, value_dim, .. } = *variant;
    BackwardVariant { dtype, head_dim, value_dim }
}

/// The instance of a kernel of the backward pass with tiles that a device holds, if it holds any.
fn backward_instance(
    variant: &Variant,
    kernel: &'static str,
    tile: Option<BackwardTile>,
) -> Result<Instance, VariantError> {
    let of = backward(variant);
    let none = VariantError::Tile { kernel };
    let tile = tile.ok_or(none.clone());
    let made = match kernel {
        "row_terms" => of.terms_instance(),
        "backward_q" => of.q_instance(tile?.q),
        "backward_kv" => of.kv_instance(tile?.kv),
        "backward_bias" => of.bias_instance(tile?.bias.ok_or(none)?),
        "sum_rows" => sum_rows::sum_rows::specialise(&[]),
        name => return Err(VariantError::Kernel { name }),
    };
    made.map_err(VariantError::Generics)
}

/// Checks the options that a kernel depends on.
fn check(variant: &Variant, kernel: &Kernel) -> Result<(), VariantError> {
    let concerns = VariantOption::of(kernel);
    let dims = [("head_dim", variant.head_dim), ("value_dim", variant.value_dim)];
    let codecs = [variant.k_codec, variant.v_codec];
    for (n, (dim, codec)) in [VariantOption::HeadDim, VariantOption::ValueDim]
        .into_iter()
        .zip([VariantOption::KCodec, VariantOption::VCodec])
        .enumerate()
    {
        let (name, got) = dims[n];
        if concerns.contains(&dim) && !(1..=MAX_HEAD_DIM).contains(&got) {
            return Err(VariantError::Dim { name, got });
        }
        if concerns.contains(&codec) && !codecs[n].supports(got) {
            return Err(VariantError::Codec { codec: codecs[n], got });
        }
    }
    Ok(())
}

/// [`instance_of`] for Apple's GPUs: of `prefill` and of the backward pass the tiles that plans take there for many rows, which keep the
/// limits of Metal on threads and threadgroup memory.
///
/// # Errors
/// [`VariantError`].
pub fn metal_instance_of(variant: &Variant, kernel: &Kernel) -> Result<Instance, VariantError> {
    match kernel.name {
        "prefill" => {
            check(variant, kernel)?;
            let tile =
                PortableTile::prefill_on(variant, &M1).ok_or(VariantError::Tile { kernel: kernel.name })?;
            tile.instance(variant).map_err(VariantError::Generics)
        }
        "backward_q" | "backward_kv" | "backward_bias" => {
            check(variant, kernel)?;
            let tile = BackwardTile::of(&backward(variant), true, &M1);
            backward_instance(variant, kernel.name, tile.ok())
        }
        _ => instance_of(variant, kernel),
    }
}

/// Head dimensions that instances of the backward pass are listed for.
const BACKWARD_DIMS: [usize; 2] = [64, 128];

/// Instances of every kernel over [`HEAD_DIMS`], types and codecs; of the backward pass for head dimensions of 64 and 128.
#[must_use]
pub fn instances() -> Vec<Instance> {
    let prefill = |variant: &Variant| Some(PortableTile::default_prefill(variant.head_dim));
    listed(prefill, |variant| BackwardTile::default_of(variant).ok())
}

/// [`instances`] for Apple's GPUs: of `prefill` and of the backward pass the tiles that plans take there for many rows, which keep the limits
/// of Metal on threads and threadgroup memory. Where a GPU holds no tile, `decode` computes prompts too, and there is no `prefill`.
#[must_use]
pub fn metal_instances() -> Vec<Instance> {
    let prefill = |variant: &Variant| PortableTile::prefill_on(variant, &M1);
    listed(prefill, |variant| BackwardTile::of(variant, true, &M1).ok())
}

/// Instances of every kernel, of `prefill` and the backward pass with tiles that depend on the variant.
fn listed(
    prefill: impl Fn(&Variant) -> Option<PortableTile>,
    backward_tile: impl Fn(&BackwardVariant) -> Option<BackwardTile>,
) -> Vec<Instance> {
    let mut all = Vec::new();
    for dim in BACKWARD_DIMS {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let codec = Codec::of(dtype);
            let variant = Variant { dtype, head_dim: dim, value_dim: dim, k_codec: codec, v_codec: codec };
            let tile = backward_tile(&backward(&variant));
            let kernels = ["row_terms", "backward_q", "backward_kv", "backward_bias"];
            all.extend(kernels.into_iter().flat_map(|kernel| backward_instance(&variant, kernel, tile)));
        }
    }
    all.extend(sum_rows::sum_rows::specialise(&[]));
    for dim in HEAD_DIMS {
        for codec in Codec::ALL.into_iter().filter(|codec| codec.supports(dim)) {
            let variant = Variant {
                dtype: codec.dtype().unwrap_or(Dtype::F16),
                head_dim: dim,
                value_dim: dim,
                k_codec: codec,
                v_codec: codec,
            };
            all.extend(PortableTile::default_decode(codec, dim).instance(&variant));
            all.extend(variant.merge());
            if codec != Codec::F32 {
                all.extend(prefill(&variant).and_then(|tile| tile.instance(&variant).ok()));
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

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile_kernel::Limits;

    const PLAIN: Variant = Variant {
        dtype: Dtype::BF16,
        head_dim: 128,
        value_dim: 128,
        k_codec: Codec::BF16,
        v_codec: Codec::BF16,
    };

    #[test]
    fn every_kernel_has_an_instance_of_a_plain_problem() {
        let listed: Vec<String> = instances().iter().map(Instance::entry).collect();
        for kernel in KERNELS {
            let codec = match kernel.name {
                "encode" | "read_codes" => Codec::Tq4,
                _ => PLAIN.k_codec,
            };
            let entry = instance_of(&Variant { k_codec: codec, ..PLAIN }, kernel).unwrap().entry();
            assert!(listed.contains(&entry), "{entry}");
        }
    }

    #[test]
    fn instances_for_metal_keep_its_limits() {
        let (all, metal) = (instances(), metal_instances());
        assert!(metal.len() <= all.len() && metal.len() > all.len() - 20, "{} of {}", metal.len(), all.len());
        let limits = Limits::default();
        for instance in &metal {
            let (threads, bytes) = (instance.threads().most(), instance.shared_bytes());
            assert!(threads <= limits.threads && bytes <= limits.shared_bytes, "{}", instance.entry());
        }
        let of = |all: &[Instance], name: &str| {
            let tiled = |i: &&Instance| {
                ["prefill", "backward_q", "backward_kv", "backward_bias"].contains(&i.kernel().name)
            };
            let of =
                all.iter().filter(|i| if name == "others" { !tiled(i) } else { i.kernel().name == name });
            of.map(Instance::entry).collect::<Vec<_>>()
        };
        assert_eq!(of(&all, "others"), of(&metal, "others"));
        assert_ne!(of(&all, "prefill"), of(&metal, "prefill"));
        let prefill = KERNELS.iter().find(|kernel| kernel.name == "prefill").unwrap();
        let entry = metal_instance_of(&PLAIN, prefill).unwrap().entry();
        assert!(of(&metal, "prefill").contains(&entry), "{entry}");
        let variant = Variant {
            head_dim: 512,
            value_dim: 512,
            k_codec: Codec::MlxTq8,
            v_codec: Codec::MlxTq8,
            ..PLAIN
        };
        let why = metal_instance_of(&variant, prefill).unwrap_err().to_string();
        assert!(why.starts_with("no tile of prefill fits"), "{why}");
        let long = Variant { value_dim: usize::MAX, ..PLAIN };
        let why = metal_instance_of(&long, prefill).unwrap_err().to_string();
        assert!(why.starts_with("value_dim is ") && why.ends_with(", expected 1 to 512"), "{why}");
    }

    #[test]
    fn registers_are_bounded_for_the_threadgroups_of_a_core() {
        let instance = PortableTile::prefill(128, 32, 8, 2).instance(&PLAIN).unwrap();
        assert_eq!(instance.resident(), 2);
        assert!(instance.source(flashtile_kernel::Target::Cuda).contains("__launch_bounds__(256, 2)"));
    }

    #[test]
    fn what_kernels_are_not_made_for_is_said() {
        let why = |variant: Variant, kernel: &Kernel| instance_of(&variant, kernel).unwrap_err().to_string();
        let long = Variant { head_dim: 513, ..PLAIN };
        assert_eq!(why(long, KERNELS[0]), "head_dim is 513, expected 1 to 512");
        let text = why(Variant { v_codec: Codec::MlxTq4, ..PLAIN }, KERNELS[1]);
        let encode = KERNELS.iter().find(|kernel| kernel.name == "encode").unwrap();
        let stored = why(PLAIN, encode);
        assert_eq!(stored, "its rows are codes and bf16 has none, expected a k-codec such as tq4");
        assert!(text.contains("does not store 128 elements") && text.contains("256"), "{text}");
    }
}
