//! The functions that an ISA file defines, as macros: each phase of the kernels is instantiated and compiled with the target
//! features of the instruction set.

use crate::kernels::forward::state::TaskState;
use crate::kernels::shared::score_task::{ScoreTask, Tile};
use crate::kernels::shared::scores::{PackKeys, PackValues};
use std::ops::Range;

/// Writes functions that are compiled with target features.
macro_rules! entry {
    ($features:tt) => {};
    ($features:tt
        fn $name:ident($($argument:ident: $T:ty),*) $(-> $R:ty)? { $call:expr }
        $($others:tt)*
    ) => {
        crate::isa::entry::entry! { @one $features fn $name($($argument: $T),*) $(-> $R)? { $call } }
        crate::isa::entry::entry! { $features $($others)* }
    };
    (@one [$($features:literal)?]
        fn $name:ident($($argument:ident: $T:ty),*) $(-> $R:ty)? { $call:expr }
    ) => {
        $(#[target_feature(enable = $features)])?
        #[inline(never)]
        unsafe fn $name($($argument: $T),*) $(-> $R)? {
            // SAFETY: the caller's contract.
            unsafe { $call }
        }
    };
}
pub(super) use entry;

/// Writes the module `$module` with the phases that depend on how elements are stored.
macro_rules! element_entries {
    ($module:ident, $S:ty, $P:ty, $features:tt, $E:ty, $R:ty) => {
        mod $module {
            use super::*;
            use crate::kernels::backward::phases as backward;
            use crate::kernels::forward::phases;
            crate::isa::entry::entry! { $features
                fn pack_keys(task: &ScoreTask<'_>, block: usize, columns: &Range<usize>) {
                    phases::pack_keys::<$S, $P, $R>(task, block, columns)
                }
                fn stream_scores(task: &ScoreTask<'_>, tile: &Tile) {
                    phases::stream_scores::<$S, $P, $R>(task, tile)
                }
                fn pack_values(task: &ScoreTask<'_>, first: usize, keys: &Range<usize>, dst: MatMut) {
                    phases::pack_values::<$S, $P, $E>(task, first, keys, dst)
                }
                fn stream_values(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>) {
                    <$P as StreamValues<$S>>::stream_values::<$E>(work, tile, columns)
                }
                fn pack_block(keys: &KeyState<'_>, block: usize, columns: &Range<usize>) {
                    backward::pack_block::<$S, $P, $E, $R>(keys, block, columns)
                }
                fn pack_rows(tile: &TileState<'_>) { backward::pack_rows::<$S, $P, $E>(tile) }
            }
            pub(super) const BACKWARD: PackPhases = PackPhases { block: pack_block, rows: pack_rows };
            pub(super) const SCORES: ScoresOf = ScoresOf { pack: pack_keys, stream: stream_scores };
            pub(super) const VALUES: ValuesOf = ValuesOf { pack: pack_values, stream: stream_values };
        }
    };
}
pub(super) use element_entries;

/// Writes the module `$module` with the phases of products `$C` with codes, on lanes `$S`.
#[cfg(target_arch = "x86_64")]
macro_rules! code_entries {
    ($module:ident, $S:ty, $C:ty, $features:literal) => {
        mod $module {
            use super::*;
            crate::isa::entry::entry! { [$features]
                fn scores(work: &TaskState<'_>, tile: &Tile) { <$C as CodeProducts<$S>>::scores(work, tile) }
                fn values(work: &TaskState<'_>, tile: &Tile) { <$C as CodeProducts<$S>>::values(work, tile) }
            }
            pub(super) const PHASES: CodePhases = CodePhases {
                takes: <$C as CodeProducts<$S>>::takes,
                takes_any_rows: <$C as CodeProducts<$S>>::TAKES_ANY_ROWS,
                set_queries: <$C as CodeProducts<$S>>::set_queries,
                scores,
                values,
            };
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use code_entries;

/// The phases of scores that depend on how keys are stored.
#[derive(Clone, Copy)]
pub(super) struct ScoresOf {
    pub(super) pack: PackKeys,
    pub(super) stream: unsafe fn(&ScoreTask<'_>, &Tile),
}

/// The phases of values that depend on how values are stored.
#[derive(Clone, Copy)]
pub(super) struct ValuesOf {
    pub(super) pack: PackValues,
    pub(super) stream: unsafe fn(&TaskState<'_>, &Tile, &Range<usize>),
}

/// Defines `kernels` and `LOOPS` of an ISA file, from lanes `$S` and products `$P`: for `any` storage, or for elements that are `pairs` of
/// bf16.
macro_rules! entry_points {
    (any, $S:ty, $P:ty $(, $features:literal)?) => {
        crate::isa::entry::entry_points!(@common $S, $P, [$($features)?]);
        crate::isa::entry::element_entries!(f32_elements, $S, $P, [$($features)?], f32, Single<f32>);
        crate::isa::entry::element_entries!(f16_elements, $S, $P, [$($features)?], F16, Single<F16>);
        crate::isa::entry::element_entries!(bf16_elements, $S, $P, [$($features)?], Bf16, Double);
        crate::isa::entry::entry! { [$($features)?]
            fn pack_key_codes(task: &ScoreTask<'_>, block: usize, columns: &Range<usize>) {
                phases::pack_key_codes::<$S>(task, block, columns)
            }
        }

        /// The kernels of this instruction set for the storage of keys and of values.
        pub(in crate::isa) fn kernels(k: Storage, v: Storage) -> Kernels {
            let scores = match k {
                Storage::Elements(Dtype::F32) => f32_elements::SCORES,
                Storage::Elements(Dtype::F16) => f16_elements::SCORES,
                Storage::Elements(Dtype::BF16) => bf16_elements::SCORES,
                // A streaming task multiplies codes by `code_phases`.
                Storage::Codes => ScoresOf { pack: pack_key_codes, ..f32_elements::SCORES },
            };
            let values = match v {
                Storage::Elements(Dtype::F32) => f32_elements::VALUES,
                Storage::Elements(Dtype::F16) => f16_elements::VALUES,
                Storage::Elements(Dtype::BF16) => bf16_elements::VALUES,
                Storage::Codes => ValuesOf { pack: phases::pack_value_codes, ..f32_elements::VALUES },
            };
            with_elements(scores, values)
        }

        /// The backward kernels of this instruction set for a dtype.
        pub(in crate::isa) fn backward_kernels(dtype: Dtype) -> BackwardKernels {
            match dtype {
                Dtype::F32 => with_pack_phases(f32_elements::SCORES, f32_elements::BACKWARD),
                Dtype::F16 => with_pack_phases(f16_elements::SCORES, f16_elements::BACKWARD),
                Dtype::BF16 => with_pack_phases(bf16_elements::SCORES, bf16_elements::BACKWARD),
            }
        }
    };
    (pairs, $S:ty, $P:ty $(, $features:literal)?) => {
        crate::isa::entry::entry_points!(@common $S, $P, [$($features)?]);
        // Two neighbouring elements of a key take the place of an f32.
        crate::isa::entry::element_entries!(bf16_elements, $S, $P, [$($features)?], Bf16, Single<f32>);

        /// The kernels of this instruction set, of bf16 keys and values.
        pub(in crate::isa) fn kernels(k: Storage, v: Storage) -> Kernels {
            debug_assert!([k, v] == [Storage::Elements(Dtype::BF16); 2], "plans choose pairs for bf16 alone");
            with_elements(bf16_elements::SCORES, bf16_elements::VALUES)
        }

        /// The backward kernels of this instruction set, of bf16.
        pub(in crate::isa) fn backward_kernels(dtype: Dtype) -> BackwardKernels {
            debug_assert!(dtype == Dtype::BF16, "plans choose pairs for bf16 alone");
            with_pack_phases(bf16_elements::SCORES, bf16_elements::BACKWARD)
        }
    };
    (@common $S:ty, $P:ty, $features:tt) => {
        #[allow(clippy::wildcard_imports, reason = "what every instruction set's phases name")]
        use crate::isa::entry::entry_imports::*;

        crate::isa::entry::entry! { $features
            fn configure() -> MatrixUnitGuard { <$P as Products<$S>>::configure() }
            fn pack_queries(task: &ScoreTask<'_>) { phases::pack_queries::<$S, $P>(task) }
            fn packed_scores(task: &ScoreTask<'_>, tile: &Tile) { phases::packed_scores::<$S, $P>(task, tile) }
            fn probs(work: &TaskState<'_>, tile: &Tile) { phases::probs::<$S, $P>(work, tile) }
            fn packed_values(work: &TaskState<'_>, tile: &Tile, columns: &Range<usize>, packed_v: Mat) {
                phases::packed_values::<$S, $P>(work, tile, columns, packed_v)
            }
            fn repair_nonfinite(work: &TaskState<'_>, tile: &Tile) { phases::repair_nonfinite::<$S, $P>(work, tile) }
            fn fold(rows: usize, fold: &Fold) { phases::fold::<$S>(rows, fold) }
            fn finish(work: &TaskState<'_>, first: usize, rows: usize, state: &RowState) {
                phases::finish::<$S>(work, first, rows, state)
            }
            fn row_terms(cx: &Context<'_>, rows: Rows) { backward::row_terms::<$S>(cx, rows) }
            fn d_scores(work: &TileState<'_>, tile: &Tile) { backward::d_scores::<$S, $P>(work, tile) }
            fn add_products(work: &TileState<'_>, tile: &Tile, resumes_d_q: bool) {
                backward::add_products::<$S, $P>(work, tile, resumes_d_q)
            }
            fn store(to: &TensorViewMut<'_>, row: [usize; 3], src: *const f32, scale: f32) {
                backward::store::<$S>(to, row, src, scale)
            }
            fn peak_loop(rounds: u64) -> f32 { <$P as Products<$S>>::peak_loop(rounds) }
            fn read_loop(p: *const f32, len: usize) -> f32 { crate::kernels::shared::loops::read_loop::<$S>(p, len) }
        }

        /// The loops that measure the limits of this instruction set.
        pub(in crate::isa) const LOOPS: Loops = Loops {
            peak: peak_loop,
            peak_round: <$P as Products<$S>>::PEAK_ROUND,
            read: read_loop,
        };

        fn score_kernels(scores: ScoresOf) -> ScoreKernels {
            ScoreKernels { pack_queries, pack_keys: scores.pack, packed_scores, stream_scores: scores.stream }
        }

        fn with_pack_phases(scores: ScoresOf, pack: PackPhases) -> BackwardKernels {
            BackwardKernels {
                scores: score_kernels(scores),
                configure,
                d_k_factor: <$P as BackwardProducts<$S>>::d_k_factor,
                row_terms,
                pack_block: pack.block,
                pack_rows: pack.rows,
                d_scores,
                add_products,
                store,
            }
        }

        fn with_elements(scores: ScoresOf, values: ValuesOf) -> Kernels {
            Kernels {
                scores: score_kernels(scores),
                key_steps: products::key_steps::<$S, $P>(),
                code_phases: &[],
                configure,
                probs,
                pack_values: values.pack,
                packed_values,
                stream_values: values.stream,
                repair_nonfinite,
                fold,
                finish,
            }
        }
    };
}
pub(super) use entry_points;

/// The names that [`entry_points`] uses.
pub(super) mod entry_imports {
    pub(in crate::isa) use super::{ScoresOf, ValuesOf};
    pub(in crate::isa) use crate::kernels::backward::operands::BackwardProducts;
    pub(in crate::isa) use crate::kernels::backward::phases as backward;
    pub(in crate::isa) use crate::kernels::backward::state::{
        BackwardKernels, Context, KeyState, PackPhases, TileState,
    };
    pub(in crate::isa) use crate::kernels::forward::phases;
    pub(in crate::isa) use crate::kernels::forward::products::stream_values::StreamValues;
    pub(in crate::isa) use crate::kernels::forward::state::{Fold, Kernels, RowState, Storage, TaskState};
    pub(in crate::isa) use crate::kernels::shared::loops::Loops;
    pub(in crate::isa) use crate::kernels::shared::mat::{Mat, MatMut};
    pub(in crate::isa) use crate::kernels::shared::matrix_unit::MatrixUnitGuard;
    pub(in crate::isa) use crate::kernels::shared::products::{self, Products};
    pub(in crate::isa) use crate::kernels::shared::score_task::{ScoreTask, Tile};
    pub(in crate::isa) use crate::kernels::shared::scores::ScoreKernels;
    pub(in crate::isa) use crate::plan::Rows;
    pub(in crate::isa) use crate::simd::{Bf16, Double, F16, Single};
    pub(in crate::isa) use flashtile_core::dtype::Dtype;
    pub(in crate::isa) use flashtile_core::tensor::TensorViewMut;
    pub(in crate::isa) use std::ops::Range;
}
