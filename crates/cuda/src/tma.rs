//! Maps of tensors, by which the tensor memory accelerator (TMA) copies boxes of them to shared memory.

#![allow(unsafe_code)]

use crate::device_struct::DeviceField;
use flashtile_core::dtype::Dtype;
use flashtile_kernel::cuda::cudarc::driver::sys;

/// A map as the driver encodes it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u64; 16]);

impl TensorMap {
    /// The struct in C++.
    pub(crate) fn device_source() -> String {
        "struct __align__(64) TensorMap {\n    u64 words[16];\n};\nstatic_assert(sizeof(TensorMap) == 128);\n"
            .to_owned()
    }
}

impl DeviceField for TensorMap {
    fn declaration(name: &str) -> String {
        format!("TensorMap {name}")
    }
}

/// Columns of a box: 128 bytes of 16-bit elements, a panel of a tile.
const BOX_COLUMNS: u32 = 64;

/// Elements of a dimension that bounds nothing.
const UNBOUNDED: u64 = (1 << 31) - 1;

/// Rows of the dimension that bounds sequences, and elements of a step of the dimension that leads back (`RaggedRows` of the kernels).
const RAGGED_ROWS: u64 = 1 << 30;
const RAGGED_STEP: u64 = 1 << 34;

/// A map of a tensor `[rows, heads, columns]` whose copies end where a sequence ends, and the rows from one batch entry, or page, to the next.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct RaggedMap {
    pub(crate) map: TensorMap,
    pub(crate) batch_rows: u32,
}

/// A tensor of 16-bit elements to be copied in boxes of `box_heads` heads and `box_rows` rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Boxes {
    pub(crate) at: u64,
    /// Bytes between batch entries (or pages), heads and rows.
    pub(crate) steps: [i64; 3],
    pub(crate) dtype: Dtype,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    /// Rows of a batch entry or page.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) box_heads: u32,
    pub(crate) box_rows: u32,
}

impl Boxes {
    /// The map; none where TMA cannot copy the tensor: it needs addresses and strides of multiples of 16 bytes, rows that do not overlap, and
    /// batch entries that are whole rows apart.
    pub(crate) fn ragged_map(&self) -> Option<RaggedMap> {
        let Self { at, steps: [batch_step, head_step, row_step], dtype, .. } = *self;
        let Self { batch, heads, rows, columns, box_heads, box_rows, .. } = *self;
        let bytes = dtype.bytes() as u64;
        // Steps along an axis of one index are never taken.
        let row_bytes = columns as u64 * bytes;
        let row = u64::try_from(row_step).ok().filter(|&step| step >= row_bytes);
        let row = if batch * rows <= 1 { row_bytes.next_multiple_of(16) } else { row? };
        let head = u64::try_from(head_step).ok().filter(|&step| step > 0);
        let head = if heads <= 1 { row } else { head? };
        let batch_step = if batch <= 1 { 0 } else { u64::try_from(batch_step).ok()? };
        let aligned = [at, row, head].into_iter().all(|x| x.is_multiple_of(16));
        if !aligned || !batch_step.is_multiple_of(row) {
            return None;
        }
        // Coordinates are i32, and the first and the last rows of the tensor lie within them.
        let batch_rows = batch_step / row;
        let all = batch_rows.checked_mul(batch as u64)?.checked_add(rows as u64)?;
        if all >= RAGGED_ROWS || row >= RAGGED_STEP || head >= 1 << 40 {
            return None;
        }
        let dims = [columns as u64, heads as u64, RAGGED_ROWS, UNBOUNDED, UNBOUNDED];
        let strides = [head, row, RAGGED_STEP * bytes - row, row];
        let (boxes, steps) = ([BOX_COLUMNS, box_heads, box_rows, 1, 1], [1; 5]);
        let kind = match dtype {
            Dtype::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Dtype::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Dtype::F32 => return None,
        };
        let mut map = TensorMap::default();
        // SAFETY: the map has the size and the alignment of the driver's; the arrays have five and four elements, as the rank says.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                kind,
                5,
                at as *mut _,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        (result == sys::CUresult::CUDA_SUCCESS).then_some(RaggedMap { map, batch_rows: batch_rows as u32 })
    }
}
