//! Parameters of the native kernels.

use crate::device_struct::device_struct;
use crate::tma::TensorMap;
use flashtile_core::dtype::Dtype;
use flashtile_gpu::kernels::attend::divisor;

/// The number of a dtype in the native kernels: `Dtype` of `types.cuh`.
pub(super) const fn dtype_id(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::BF16 => 2,
    }
}

/// The name of a dtype in the native kernels.
pub(super) const fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "F32",
        Dtype::F16 => "F16",
        Dtype::BF16 => "BF16",
    }
}

device_struct! {
    /// A tensor: its address, and the bytes between batch entries (or pages), heads and rows.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct Tensor {
        pub(super) at: u64,
        pub(super) batch: i64,
        pub(super) head: i64,
        pub(super) row: i64,
    }
}

device_struct! {
    /// `x / value` by a product and a shift, for every `x` below 2^31.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct Divisor {
        pub(super) value: u32,
        pub(super) multiplier: u32,
        pub(super) shift: u32,
    }
}

impl Divisor {
    /// Of a value from 1 to 2^31 - 1.
    pub(super) fn new(value: usize) -> Self {
        let [multiplier, shift] = divisor(value);
        Self { value: value.clamp(1, (1 << 31) - 1) as u32, multiplier, shift }
    }
}

device_struct! {
    /// Parameters of attention. Addresses of absent tensors are 0.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct ForwardParams {
        pub(super) q: Tensor,
        pub(super) k: Tensor,
        pub(super) v: Tensor,
        pub(super) out: Tensor,
        pub(super) mask: Tensor,
        pub(super) lse: u64,
        pub(super) tree_mask: u64,
        pub(super) alibi_slopes: u64,
        pub(super) sinks: u64,
        pub(super) block_table: u64,
        pub(super) work_tiles: u64,
        pub(super) counters: u64,
        pub(super) mask_tiles: u64,
        pub(super) partials: u64,
        /// Bytes from a row of the tree mask to the next.
        pub(super) tree_row: i64,
        /// Keys to either side; unbounded where negative.
        pub(super) window_left: i64,
        pub(super) window_right: i64,
        pub(super) page_size: Divisor,
        /// Blocks of a table that wraps around; 0 where it does not.
        pub(super) ring_blocks: Divisor,
        pub(super) gqa_group: Divisor,
        pub(super) q_heads: u32,
        /// Query positions of a batch entry, by which `lse` is indexed.
        pub(super) q_len: u32,
        /// The problem's head dimensions, not rounded up: `HEAD_DIM` and `VALUE_DIM` are the kernel's.
        pub(super) head_dim: u32,
        pub(super) value_dim: u32,
        /// Factor of `q . k`, with log2 e folded in; where there is a softcap, `scale / softcap` without it (`log2_factors`).
        pub(super) scale: f32,
        /// Factor of the tanh, with log2 e folded in; 0 where there is no softcap.
        pub(super) softcap: f32,
        /// `Dtype` of an additive mask, 3 of a bool one.
        pub(super) mask_kind: u32,
        /// Elements from a key of the mask to the next: 1, or 0 where all keys have the same.
        pub(super) mask_step: u32,
        /// Bytes from a key of the tree mask to the next.
        pub(super) tree_step: u32,
        /// 1 if no tile is skipped or taken to be visible in full (`PlanOptions::skip_tiles`), else 0.
        pub(super) mask_every_tile: u32,
        /// Mask tiles along the query positions, and along the keys, of a plane of `mask_tiles`.
        pub(super) mask_q_tiles: u32,
        pub(super) mask_k_blocks: u32,
        /// Entries of a sequence in the block table.
        pub(super) block_table_width: u32,
        /// Slopes from one sequence to the next; 0 where all sequences share them.
        pub(super) alibi_stride: u32,
        /// Keys of a chunk, of which a query sees its own; 0 where there are none.
        pub(super) chunk: u32,
        pub(super) unused: [u32; 2],
    }
}

device_struct! {
    /// Parameters of the prefill kernels for compute capability 9.0. Maps are read where kernels copy by TMA.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct PrefillParams {
        pub(super) q: TensorMap,
        pub(super) k: TensorMap,
        pub(super) v: TensorMap,
        pub(super) forward: ForwardParams,
        /// Rows of a tensor from one batch entry, or page, to the next.
        pub(super) q_batch_rows: u32,
        pub(super) k_batch_rows: u32,
        pub(super) v_batch_rows: u32,
        /// Rows of a box of keys or values in pages.
        pub(super) kv_box_rows: u32,
        /// Query positions of 64 rows; 0 where warps copy q themselves.
        pub(super) q_box_positions: u32,
        /// Work tiles that blocks of threads take one after another, by the first counter; 0 where each block has a list.
        pub(super) queued: u32,
    }
}

device_struct! {
    /// Parameters of the backward pass on any device. All addresses but `d_q.at` and `alibi_slopes` are in scratch memory.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct BackwardParams {
        pub(super) d_q: Tensor,
        pub(super) units: u64,
        pub(super) sequences: u64,
        pub(super) tile_units: u64,
        /// `-lse` in units of log2 and delta of each row, by tiles.
        pub(super) neg_lse: u64,
        pub(super) delta: u64,
        /// The place of the unit whose turn it is to add to a tile.
        pub(super) turns: u64,
        pub(super) d_q_sums: u64,
        /// 0 where there is no ALiBi.
        pub(super) alibi_slopes: u64,
        /// Sums of gradients of biases times distances, of each warp, head and unit. 0 where no gradient of slopes is asked for.
        pub(super) distance_sums: u64,
        /// Factor of `q . k`, without and with log2 e.
        pub(super) scale: f32,
        pub(super) scale_log2: f32,
        /// The score of a pair that is not seen, before it is scaled.
        pub(super) hidden: f32,
        /// `softcap log2 e`, and the factor of `q . k` in its tanh: `scale / softcap`.
        pub(super) softcap: f32,
        pub(super) softcap_scale: f32,
        pub(super) q_heads: u32,
        /// Query heads of a key/value head.
        pub(super) group: u32,
        pub(super) head_dim: u32,
        /// 1 if all heads of a group take a tile before the next.
        pub(super) heads_inner: u32,
        /// Keys to either side of a position that its window shows.
        pub(super) left: i32,
        pub(super) right: i32,
        /// Keys of a chunk, of which a query sees its own.
        pub(super) chunk: i32,
        /// ALiBi slopes from one sequence to the next.
        pub(super) alibi_stride: u32,
        pub(super) unused: u32,
    }
}

device_struct! {
    /// Parameters of the backward pass on compute capability 9.0.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct Sm90BackwardParams {
        pub(super) q: TensorMap,
        pub(super) k: TensorMap,
        pub(super) v: TensorMap,
        pub(super) d_out: TensorMap,
        pub(super) d_k: TensorMap,
        pub(super) d_v: TensorMap,
        pub(super) backward: BackwardParams,
        /// Rows of a tensor from one batch entry to the next.
        pub(super) q_batch_rows: u32,
        pub(super) k_batch_rows: u32,
        pub(super) v_batch_rows: u32,
        pub(super) d_out_batch_rows: u32,
        pub(super) d_k_batch_rows: u32,
        pub(super) d_v_batch_rows: u32,
        pub(super) unused: [u32; 2],
    }
}

device_struct! {
    /// Parameters of the backward pass by `mma.sync`.
    #[derive(Debug, Clone, Copy, Default)]
    pub(super) struct Sm80BackwardParams {
        pub(super) backward: BackwardParams,
        pub(super) q: Tensor,
        pub(super) k: Tensor,
        pub(super) v: Tensor,
        pub(super) d_out: Tensor,
        pub(super) d_k: Tensor,
        pub(super) d_v: Tensor,
        pub(super) value_dim: u32,
        pub(super) unused: u32,
    }
}

device_struct! {
    /// Parameters of what the backward pass computes of each query row first.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct PrepareParams {
        pub(super) backward: BackwardParams,
        pub(super) out: Tensor,
        pub(super) d_out: Tensor,
        pub(super) lse: u64,
        /// 0 where there is none.
        pub(super) d_lse: u64,
        pub(super) sinks: u64,
        /// 0 where no gradient of sinks is asked for.
        pub(super) d_sinks: u64,
        /// 0 where no gradient of slopes is asked for.
        pub(super) d_alibi_slopes: u64,
        /// Terms of the gradients of a head's sink and slope, by tiles: in scratch memory.
        pub(super) sink_terms: u64,
        pub(super) shift_terms: u64,
        /// Query rows of a batch entry, by which `lse` is indexed.
        pub(super) q_len: u32,
        pub(super) value_dim: u32,
        pub(super) sequences: u32,
        pub(super) units: u32,
    }
}

device_struct! {
    /// Parameters of the pre-pass over a materialised mask.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct MaskTileParams {
        pub(super) mask: u64,
        pub(super) mask_tiles: u64,
        pub(super) sequence: i64,
        pub(super) head: i64,
        pub(super) row: i64,
        pub(super) kind: u32,
        pub(super) step: u32,
        pub(super) heads: u32,
        pub(super) rows: u32,
        pub(super) keys: u32,
        pub(super) block: u32,
        pub(super) q_tiles: u32,
        pub(super) k_blocks: u32,
    }
}

device_struct! {
    /// Parameters of the measurement of bandwidth.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct ReadParams {
        /// Chunks of 16 bytes.
        pub(super) from: u64,
        pub(super) count: u64,
        pub(super) sink: u64,
    }
}

device_struct! {
    /// Parameters of the measurement of the matrix unit.
    #[derive(Debug, Clone, Copy)]
    pub(super) struct ProductParams {
        pub(super) sink: u64,
        pub(super) rounds: u32,
        pub(super) unused: u32,
    }
}
