//! Native code of the instances that the simulator runs.

use flashtile_core::codec::Codec;
use flashtile_gpu::codecs::format_id;
use flashtile_gpu::kernels::encode;
use flashtile_gpu::kernels::mask_tiles::mask_tiles;
use flashtile_gpu::kernels::merge::merge;
use flashtile_gpu::kernels::rotation::hadamard;
use flashtile_gpu::{native_decode, native_encode, native_prefill};
use flashtile_kernel::{Instance, bf16, f16};

/// Dimensions of keys and values.
pub(crate) const DIMS: [usize; 2] = [64, 128];

/// Codecs of keys and values, besides elements of q's dtype.
pub(crate) const CODECS: [[Codec; 2]; 3] = [[Codec::Int8; 2], [Codec::Tq4; 2], [Codec::Int8, Codec::Tq5]];

/// The instance with native code, if there is one.
pub(crate) fn find(wanted: &Instance) -> Option<Instance> {
    let all = match wanted.kernel().name {
        "decode" => decodes(),
        "prefill" => prefills(),
        "merge" => merges(),
        "hadamard" => vec![hadamard::instance::<64, 1>(), hadamard::instance::<128, 1>()],
        "encode" => vec![native_encode!(bf16, format_id(Codec::Tq4), 128)],
        "append" => vec![encode::append::instance::<bf16, { format_id(Codec::BF16) }>()],
        _ => vec![mask_tiles::instance()],
    };
    all.into_iter().find(|instance| {
        instance.kernel().name == wanted.kernel().name && instance.generics() == wanted.generics()
    })
}

/// Types of q and of both products, codecs, dimension.
macro_rules! decode {
    ($q:ident $product:ident $k:ident $v:ident $d:literal) => {
        native_decode!(
            [$q, $product, $product]
            [format_id(Codec::$k), format_id(Codec::$v), $d, $d]
            [1, 1, 2]
        )
    };
}

macro_rules! decodes {
    ($($q:ident $product:ident $k:ident $v:ident;)*) => {
        vec![$(decode!($q $product $k $v 64), decode!($q $product $k $v 128)),*]
    };
}

fn decodes() -> Vec<Instance> {
    decodes! {
        f32 f32 F32 F32;
        f16 f16 F16 F16;
        bf16 bf16 BF16 BF16;
        f32 f16 Int8 Int8;
        f16 f16 Int8 Int8;
        bf16 f16 Int8 Int8;
        f32 f16 Tq4 Tq4;
        f16 f16 Tq4 Tq4;
        bf16 f16 Tq4 Tq4;
        f32 f16 Int8 Tq5;
        f16 f16 Int8 Tq5;
        bf16 f16 Int8 Tq5;
    }
}

fn prefills() -> Vec<Instance> {
    macro_rules! prefills {
        ($($q:ident $codec:ident)*) => {
            vec![$(
                native_prefill!([$q] [format_id(Codec::$codec), 64, 64] [1, 1, 2]),
                native_prefill!([$q] [format_id(Codec::$codec), 128, 128] [1, 1, 2]),
            )*]
        };
    }
    prefills!(f32 F32 f16 F16 bf16 BF16)
}

fn merges() -> Vec<Instance> {
    macro_rules! merges {
        ($($q:ident)*) => {
            vec![$(
                merge::instance::<$q, 64, 0>(),
                merge::instance::<$q, 128, 0>(),
                merge::instance::<$q, 64, 1>(),
                merge::instance::<$q, 128, 1>(),
            )*]
        };
    }
    merges!(f32 f16 bf16)
}

#[cfg(test)]
mod tests {
    use super::super::PREFILL_TILE;
    use super::*;
    use flashtile_core::dtype::Dtype;
    use flashtile_gpu::tile::PortableTile;
    use flashtile_gpu::variant::Variant;

    #[test]
    fn there_is_native_code_for_what_is_offered() {
        let tile = PortableTile::new(8, 16, 2, 1);
        for q in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for codecs in CODECS.into_iter().chain([[Codec::of(q); 2]]) {
                for dim in DIMS {
                    let [k_codec, v_codec] = codecs;
                    let variant = Variant { dtype: q, head_dim: dim, value_dim: dim, k_codec, v_codec };
                    let wanted = variant.attend(tile).unwrap();
                    assert!(
                        find(&wanted).is_some_and(|found| found.native().is_some()),
                        "{}",
                        wanted.entry()
                    );
                    if codecs == [Codec::of(q); 2] {
                        let wanted = variant.attend(PREFILL_TILE).unwrap();
                        assert!(find(&wanted).is_some_and(|found| found.native().is_some()));
                    }
                    let wanted = variant.merge().unwrap();
                    assert!(
                        find(&wanted).is_some_and(|found| found.native().is_some()),
                        "{}",
                        wanted.entry()
                    );
                }
            }
        }
    }
}
