//! Conversion of pages from and to the buffers of mlx-native.

use super::error::PagesError;
use super::kind::{Codec, RowKind};
use super::mlx::{BLOCK, code_bytes};
use super::pages::{CodePages, Side};

/// Conversion from and to the buffers of mlx-native.
impl CodePages {
    /// Pages `[slots, kv_heads, capacity, dim]` from buffers of mlx-native, one page for each slot: `codes` is
    /// `[slots, kv_heads, capacity, dim / 2]` for 4 bits and `[slots, kv_heads, capacity, dim]` for others, `norms`
    /// is `[slots, kv_heads, capacity, dim / 256]`. A cache of one sequence is one slot. With a block table of one
    /// entry, a page of `capacity` tokens and, for rings, [`wraps`](crate::block_tables::BlockTables::wraps),
    /// attention reads token `j` of a slot from its row `j % capacity`, as mlx-native does.
    ///
    /// ```
    /// use flashtile::codec::CodePages;
    /// use flashtile::{BlockTables, Codec, Cpu, Dtype, HeadShape, Inputs, KvView, Outputs, PlanOptions, ProblemDesc};
    /// use flashtile::{SeqLens, TensorView, TensorViewMut, Visibility};
    /// // A ring of 64 tokens, for 2 heads of 256 elements, after 100 tokens.
    /// let (codes, norms) = (vec![130u8; 2 * 64 * 256], vec![16.0f32; 2 * 64]);
    /// let pages = CodePages::from_mlx(Codec::MlxTq8, [1, 2, 64, 256], &codes, &norms)?;
    /// let tables =
    ///     BlockTables { table: vec![0], width: 1, page_size: 64, wraps: true, lens: vec![100], first: vec![36] };
    /// let heads = HeadShape { q_heads: 4, kv_heads: 2, head_dim: 256, value_dim: 256 };
    /// let mut desc = ProblemDesc::cached(heads, Dtype::F32, &[SeqLens::decode(100)]);
    /// (desc.k_codec, desc.v_codec) = (Some(Codec::MlxTq8), Some(Codec::MlxTq8));
    /// desc.visibility = Visibility::window(Some(63), Some(0));
    /// let (q, mut out) = (vec![0.5f32; 4 * 256], vec![0.0f32; 4 * 256]);
    /// let kv = KvView::Codes(pages.view());
    /// let inputs = Inputs::paged_kv(TensorView::packed(&q, [1, 4, 256])?, kv, kv, &tables);
    /// let cpu = Cpu::new();
    /// let plan = cpu.plan(&desc.validate()?, PlanOptions::default())?;
    /// let mut outputs = Outputs::new(TensorViewMut::packed(&mut out, [1, 4, 256])?);
    /// cpu.run(&plan, &inputs, &mut outputs, &mut plan.workspace())?;
    /// assert!(out.iter().any(|x| *x != 0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PagesError::Format`] for another codec, [`PagesError::Length`], [`PagesError::Norm`] for the first norm that
    /// is negative or not finite, and the errors of [`CodePages::new`].
    pub fn from_mlx(
        codec: Codec,
        shape: [usize; 4],
        codes: &[u8],
        norms: &[f32],
    ) -> Result<Self, PagesError> {
        let mut pages = Self::new(codec, Side::Keys, shape)?;
        let [page_codes, page_norms] = pages.mlx_sizes([codes.len(), norms.len()])?;
        let [_, heads, capacity, _] = shape;
        let is_norm = |norm: &f32| *norm >= 0.0 && norm.is_finite();
        if let Some(at) = norms.iter().position(|norm| !is_norm(norm)) {
            let row = at / (page_norms / capacity);
            let [slot, head, row] = [row / capacity / heads, row / capacity % heads, row % capacity];
            return Err(PagesError::Norm { slot, head, row, norm: norms[at] });
        }
        for at in 0..shape[0] * heads {
            let (into, scales) = pages.bytes_mut(at / heads, at % heads).split_at_mut(page_codes);
            into.copy_from_slice(&codes[at * page_codes..][..page_codes]);
            for (bytes, norm) in scales.as_chunks_mut().0.iter_mut().zip(&norms[at * page_norms..]) {
                *bytes = norm.to_le_bytes();
            }
        }
        Ok(pages)
    }

    /// Writes the pages to buffers of mlx-native. The inverse of [`CodePages::from_mlx`].
    ///
    /// # Errors
    /// [`PagesError::Format`] for another codec, [`PagesError::KeyTransform`] if a mean was subtracted from the rows, or
    /// [`PagesError::Length`]. On error, nothing is written.
    pub fn to_mlx(&self, codes: &mut [u8], norms: &mut [f32]) -> Result<(), PagesError> {
        let [page_codes, page_norms] = self.mlx_sizes([codes.len(), norms.len()])?;
        if !self.key_transform().is_identity() {
            return Err(PagesError::KeyTransform);
        }
        let [slots, heads, ..] = self.shape();
        let view = self.view();
        for at in 0..slots * heads {
            let (from, scales) = view.page(at / heads, at % heads).split_at(page_codes);
            codes[at * page_codes..][..page_codes].copy_from_slice(from);
            for (norm, bytes) in norms[at * page_norms..].iter_mut().zip(scales.as_chunks().0) {
                *norm = f32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// Number of code bytes and number of norms in a page of one head, if the buffers have the lengths that all pages need.
    fn mlx_sizes(&self, lengths: [usize; 2]) -> Result<[usize; 2], PagesError> {
        let ([slots, heads, capacity, dim], codec) = (self.shape(), self.codec());
        let RowKind::Mlx { bits, .. } = codec.row_kind() else {
            return Err(PagesError::Format { codec });
        };
        let sizes = [capacity * code_bytes(dim, bits), capacity * (dim / BLOCK)];
        for ((buffer, got), size) in ["codes", "norms"].into_iter().zip(lengths).zip(sizes) {
            let expected = slots * heads * size;
            if got != expected {
                return Err(PagesError::Length { buffer, got, expected });
            }
        }
        Ok(sizes)
    }
}
