//! The portable kernels on their simulator: native code of some instances, and sessions on it.

use crate::backward::tile::small_tile;
use crate::codecs::format_id;
use crate::engine::PortableEngine;
use crate::kernels::backward::row_terms::row_terms;
use crate::kernels::backward::sum_rows::sum_rows;
use crate::kernels::mask_tiles::mask_tiles;
use crate::kernels::merge::merge;
use crate::kernels::rotation::hadamard;
use crate::kernels::{cache, encode};
use crate::session::Session;
use crate::tile::{PortableTile, Tiling};
use crate::{
    native_backward_bias, native_backward_kv, native_backward_q, native_decode, native_encode, native_prefill,
};
use flashtile_core::codec::Codec;
use flashtile_core::problem::Problem;
use flashtile_kernel::simulator::Simulator;
use flashtile_kernel::{Instance, bf16, f16};

/// Dimensions of keys and values that there is native code for.
pub const DIMS: [usize; 2] = [64, 128];

/// Codecs of keys and values that there is native code for, besides elements of q's dtype.
pub const CODECS: [[Codec; 2]; 3] = [[Codec::Int8; 2], [Codec::Tq4; 2], [Codec::Int8, Codec::Tq5]];

/// The tile of decode that there is native code for: two SIMD groups a threadgroup and two splits, so that both merges take place.
pub const DECODE_TILE: Tiling = PortableTile::new(8, 16, 2, 1).with_splits(2);

/// The tile of prefill that there is native code for: two SIMD groups of 16 rows, blocks of 16 keys.
pub const PREFILL_TILE: PortableTile = PortableTile::prefill(32, 16, 2, 1);

/// A session on the simulator, which checks every access of the kernels to memory. It computes ten to a hundred thousand scores per
/// second, for the dimensions [`DIMS`] and the codecs [`CODECS`] or elements of the dtype of q; it refuses other problems.
///
/// ```
/// use flashtile_core::inputs::{Inputs, Outputs};
/// use flashtile_core::problem::{Dims, ProblemDesc};
/// use flashtile_core::dtype::Dtype;
/// use flashtile_core::tensor::{TensorView, TensorViewMut};
/// use flashtile_gpu::simulator::{DECODE_TILE, session};
/// let dims = Dims { batch: 1, q_heads: 2, kv_heads: 1, q_len: 1, kv_len: 20, head_dim: 64, value_dim: 64 };
/// let (q, kv, mut out) = (vec![0.1f32; 2 * 64], vec![0.2f32; 20 * 64], vec![0.0f32; 2 * 64]);
/// let kv = TensorView::bhsd(&kv, dims.k_shape())?;
/// let inputs = Inputs::new(TensorView::bhsd(&q, dims.q_shape())?, kv, kv);
/// let mut outputs = Outputs::new(TensorViewMut::bhsd(&mut out, dims.out_shape())?);
/// session(DECODE_TILE).compute(&ProblemDesc::new(dims, Dtype::F32), &inputs, &mut outputs)?;
/// assert!((out[0] - 0.2).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn session(tiling: impl Into<Tiling>) -> Session<PortableEngine<Simulator>> {
    Session::new(Simulator::new(), engine(tiling))
}

/// The engine of [`session()`].
#[must_use]
pub fn engine(tiling: impl Into<Tiling>) -> PortableEngine<Simulator> {
    PortableEngine::with_tiling(tiling).with_native(find, no_native)
}

/// Why there is no native code of a problem.
#[must_use]
pub fn no_native(problem: &Problem) -> String {
    let dims = problem.dims();
    let codecs = CODECS.map(|[k, v]| if k == v { k.to_string() } else { format!("{k}+{v}") });
    format!(
        "the simulator has no native code: q {}, keys {} of {} and values {} of {}, expected elements of the dtype of q or {}, of {}",
        problem.dtype(),
        problem.k_codec(),
        dims.head_dim,
        problem.v_codec(),
        dims.value_dim,
        codecs.join(", "),
        DIMS.map(|dim| dim.to_string()).join(" or "),
    )
}

/// The instance with native code, if there is one.
#[must_use]
pub fn find(wanted: &Instance) -> Option<Instance> {
    let all = match wanted.kernel().name {
        "decode" => decodes(),
        "prefill" => prefills(),
        "merge" => merges(),
        "hadamard" => vec![hadamard::instance::<64, 1>(), hadamard::instance::<128, 1>()],
        "encode" => vec![
            native_encode!(bf16, format_id(Codec::Tq4), 128),
            native_encode!(bf16, format_id(Codec::Rot16), 128),
        ],
        "append" => vec![encode::append::instance::<bf16, { format_id(Codec::BF16) }>()],
        "copy_rows" => vec![cache::copy_rows::instance()],
        "read_codes" => vec![cache::read_codes::instance::<bf16, { format_id(Codec::Tq4) }, 128, 1>()],
        "read_elements" => vec![cache::read_elements::instance::<bf16, { format_id(Codec::BF16) }>()],
        "row_terms" => terms_of_rows(),
        "backward_q" => backward_q(),
        "backward_kv" => backward_kv(),
        "backward_bias" => backward_bias(),
        "sum_rows" => vec![sum_rows::instance()],
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

macro_rules! prefill {
    ($q:ident $product:ident $k:ident $v:ident $d:literal) => {
        native_prefill!(
            [$q, $product, $product]
            [format_id(Codec::$k), format_id(Codec::$v), $d, $d]
            [1, 1, 2, 1]
        )
    };
}

/// Instances of one of the macros above, of [`CODECS`] and of elements.
macro_rules! all_codecs {
    ($instance:ident) => {
        all_codecs! { $instance:
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
    };
    ($instance:ident: $($q:ident $product:ident $k:ident $v:ident;)*) => {
        vec![$($instance!($q $product $k $v 64), $instance!($q $product $k $v 128)),*]
    };
}

/// Also over tokens that are kept in 16 bits beside [`CODECS`].
fn decodes() -> Vec<Instance> {
    let kept = all_codecs! { decode: f32 f16 Rot16 Rot16; f16 f16 Rot16 Rot16; bf16 f16 Rot16 Rot16; };
    all_codecs!(decode).into_iter().chain(kept).collect()
}

fn prefills() -> Vec<Instance> {
    all_codecs!(prefill)
}

/// Instances of a macro for every dtype and dimension.
macro_rules! of_elements {
    ($instance:ident) => {
        vec![
            $instance!(f32 64),
            $instance!(f16 64),
            $instance!(bf16 64),
            $instance!(f32 128),
            $instance!(f16 128),
            $instance!(bf16 128),
        ]
    };
}

fn terms_of_rows() -> Vec<Instance> {
    macro_rules! terms {
        ($q:ident $d:literal) => {
            row_terms::instance::<$q, $d>()
        };
    }
    of_elements!(terms)
}

fn backward_q() -> Vec<Instance> {
    macro_rules! tile {
        ($q:ident $d:literal) => {
            native_backward_q!($q, [$d, $d], [1, 1, 2, 1])
        };
    }
    of_elements!(tile)
}

fn backward_kv() -> Vec<Instance> {
    macro_rules! tile {
        ($q:ident $d:literal) => {
            native_backward_kv!($q, [$d, $d], [1, 1, 2, 1, { small_tile($d).kv.in_registers as usize }])
        };
    }
    of_elements!(tile)
}

fn backward_bias() -> Vec<Instance> {
    macro_rules! tile {
        ($q:ident $d:literal) => {
            native_backward_bias!($q, [$d, $d], [1, 1, 2, 1])
        };
    }
    of_elements!(tile)
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
    use super::*;
    use crate::variant::Variant;
    use flashtile_core::dtype::Dtype;

    #[test]
    fn there_is_native_code_for_what_is_offered() {
        for q in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            for codecs in CODECS.into_iter().chain([[Codec::of(q); 2]]) {
                for dim in DIMS {
                    let [k_codec, v_codec] = codecs;
                    let variant = Variant { dtype: q, head_dim: dim, value_dim: dim, k_codec, v_codec };
                    let wanted = DECODE_TILE.tile.instance(&variant).unwrap();
                    assert!(
                        find(&wanted).is_some_and(|found| found.native().is_some()),
                        "{}",
                        wanted.entry()
                    );
                    let wanted = PREFILL_TILE.instance(&variant).unwrap();
                    assert!(
                        find(&wanted).is_some_and(|found| found.native().is_some()),
                        "{}",
                        wanted.entry()
                    );
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
