//! Matrices of f32 in memory: a pointer with its leading dimension, rows and columns. Debug builds check accesses against them.

#![allow(unsafe_code)]

/// Writes one of the two types of matrices.
macro_rules! matrix {
    ($(#[$doc:meta])* $Mat:ident, $P:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $Mat {
            ptr: $P,
            ld: usize,
            rows: usize,
            cols: usize,
        }

        impl $Mat {
            /// # Safety
            /// The type's contract.
            #[inline(always)]
            pub(crate) unsafe fn new(ptr: $P, ld: usize, rows: usize, cols: usize) -> Self {
                debug_assert!(rows <= 1 || cols <= ld, "{rows} x {cols} with a leading dimension of {ld}");
                Self { ptr, ld, rows, cols }
            }

            /// Elements from a row to the next.
            #[inline(always)]
            pub(crate) fn ld(self) -> usize {
                self.ld
            }

            #[inline(always)]
            pub(crate) fn rows(self) -> usize {
                self.rows
            }

            #[inline(always)]
            pub(crate) fn cols(self) -> usize {
                self.cols
            }

            /// Element `(row, col)`, or the end of a row or of the matrix.
            ///
            /// # Safety
            /// `row <= rows` and `col <= cols`; debug builds check this.
            #[inline(always)]
            pub(crate) unsafe fn at(self, row: usize, col: usize) -> $P {
                debug_assert!(
                    row <= self.rows && col <= self.cols,
                    "({row}, {col}) of {} x {}", self.rows, self.cols
                );
                // SAFETY: the caller's contract; the type's contract places the element in the allocation.
                unsafe { self.ptr.add(row * self.ld + col) }
            }

            /// Rows `row` to the last, and columns `col` to the last.
            ///
            /// # Safety
            /// As [`Self::at`].
            #[inline(always)]
            pub(crate) unsafe fn from(self, row: usize, col: usize) -> Self {
                // SAFETY: the caller's contract.
                let ptr = unsafe { self.at(row, col) };
                Self { ptr, ld: self.ld, rows: self.rows.wrapping_sub(row), cols: self.cols.wrapping_sub(col) }
            }

            /// The first `rows` rows and `cols` columns.
            ///
            /// # Safety
            /// The matrix has these rows and columns; debug builds check this.
            #[inline(always)]
            pub(crate) unsafe fn first(self, rows: usize, cols: usize) -> Self {
                debug_assert!(
                    rows <= self.rows && cols <= self.cols,
                    "{rows} x {cols} of {} x {}", self.rows, self.cols
                );
                Self { rows, cols, ..self }
            }
        }
    };
}

matrix! {
    /// A row-major matrix that is read.
    ///
    /// Contract of a value, which the caller of its constructor guarantees and SAFETY comments refer to:
    ///
    /// - Element `(r, c)`, with `r < rows` and `c < cols`, is at `ptr + r * ld + c`. `ld >= cols`, unless there is at most one row.
    /// - `ptr` is aligned to f32 and, as long as the value is used, valid for reads of every element, all in one allocation.
    /// - No other thread writes the elements meanwhile.
    /// - Rows that exist only for kernels that take several at a time, and columns up to a whole vector, may hold anything.
    Mat, *const f32
}

matrix! {
    /// A row-major matrix that is written, and may be read.
    ///
    /// The contract of [`Mat`], and:
    ///
    /// - `ptr` is valid for writes of every element.
    /// - No other thread accesses the elements meanwhile, and no operand of the same call overlaps them.
    MatMut, *mut f32
}

impl MatMut {
    /// This matrix, to be read.
    #[inline(always)]
    pub(crate) fn as_mat(self) -> Mat {
        let Self { ptr, ld, rows, cols } = self;
        Mat { ptr, ld, rows, cols }
    }
}

/// The maximum and the sum of the softmax numerators of some rows.
///
/// Contract: both pointers are aligned to f32 and valid for reads and writes of the rows, up to whole vectors; no other
/// thread accesses them meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct RowMaxSum {
    pub(crate) max: *mut f32,
    pub(crate) sum: *mut f32,
}

impl RowMaxSum {
    /// The rows from `row` on.
    ///
    /// # Safety
    /// There are at least `row` rows.
    #[inline(always)]
    pub(crate) unsafe fn from(self, row: usize) -> Self {
        // SAFETY: the caller's contract.
        unsafe { Self { max: self.max.add(row), sum: self.sum.add(row) } }
    }

    /// Sets rows to the maximum and sum of no keys.
    ///
    /// # Safety
    /// The rows exist.
    #[inline(always)]
    pub(crate) unsafe fn clear(self, rows: std::ops::Range<usize>) {
        for row in rows {
            // SAFETY: the caller's contract.
            unsafe { (*self.max.add(row), *self.sum.add(row)) = (f32::NEG_INFINITY, 0.0) }
        }
    }
}
