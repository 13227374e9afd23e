//! Pages of quantized rows.

use super::coder::Coder;
use super::dispatch;
use super::encode::{EncodeJob, PageRows, SourceRows};
use super::error::{EncodeError, PagesError};
use super::key_transform::{ChannelTransform, KeyTransform};
use super::kind::Codec;
use super::ops::Portable;
use super::quantizer::ScaleRule;
use crate::isa::{FloatEnv, IsaToken};
use crate::limits::MAX_HEAD_DIM;
use crate::memory::Zeroed;
use crate::tensor::TensorView;
use std::ops::Range;

/// Keys or values. The side determines how scales are chosen and whether rows may be transformed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)]
pub enum Side {
    /// Keys: unbiased scales.
    Keys,
    /// Values: least-squares scales.
    Values,
}

impl Side {
    const fn rule(self) -> ScaleRule {
        match self {
            Self::Keys => ScaleRule::Unbiased,
            Self::Values => ScaleRule::LeastSquares,
        }
    }
}

/// Pages `[pages, heads, page, dim]` of rows in a quantizing codec. A page of a head has `page` times
/// [`Codec::row_bytes`] bytes: one plane of codes after another, each with the rows one after another, then the
/// scales. [`Codec::Rot16`] has one plane of elements, and no scales.
#[derive(Debug)]
pub struct CodePages {
    memory: Zeroed,
    codec: Codec,
    coder: Coder,
    side: Side,
    shape: [usize; 4],
    /// Of every row before it is stored.
    transform: KeyTransform,
}

impl CodePages {
    /// Pages filled with zeros.
    ///
    /// # Errors
    /// [`PagesError::Elements`], [`PagesError::Shape`], [`PagesError::Dim`] unless the codec
    /// [supports](Codec::supports) the rows, or [`PagesError::Memory`].
    pub fn new(codec: Codec, side: Side, shape: [usize; 4]) -> Result<Self, PagesError> {
        let [pages, heads, page, dim] = shape;
        if [heads, page, dim].contains(&0) {
            return Err(PagesError::Shape { shape });
        }
        if !codec.supports(dim) {
            return Err(PagesError::Dim { codec, dim });
        }
        let coder = Coder::new(codec, dim).ok_or(PagesError::Elements { codec })?;
        let bytes = [page, codec.row_bytes(dim), pages].into_iter().try_fold(heads, usize::checked_mul);
        let bytes = bytes.unwrap_or(usize::MAX);
        let memory = Zeroed::new(bytes).ok_or(PagesError::Memory { bytes })?;
        Ok(Self { memory, codec, coder, side, shape, transform: KeyTransform::default() })
    }

    /// A copy in newly allocated memory.
    ///
    /// # Errors
    /// [`PagesError::Memory`].
    pub fn try_clone(&self) -> Result<Self, PagesError> {
        let bytes = self.memory.len();
        let mut memory = Zeroed::new(bytes).ok_or(PagesError::Memory { bytes })?;
        memory.copy_from_slice(&self.memory);
        let (coder, transform) = (self.coder.clone(), self.transform.clone());
        Ok(Self { memory, coder, transform, ..*self })
    }

    /// Sets the transform of keys, `[heads, dim]`. It changes scores only by rounding, but a large mean or a few large channels left in the
    /// keys take most of the codes' resolution. Rows that are stored already are not re-encoded, so their values change.
    ///
    /// # Panics
    /// If the mean or the factors have another length, or there are factors for a codec that [does not take
    /// them](Codec::supports_key_factors).
    #[doc(hidden)]
    pub fn set_key_transform(&mut self, transform: KeyTransform) {
        let expected = self.shape[1] * self.shape[3];
        let fits = |part: Option<&[f32]>| part.is_none_or(|part| part.len() == expected);
        assert!(
            fits(transform.mean()) && fits(transform.factors()),
            "expected a mean and factors of {expected} elements"
        );
        assert!(
            transform.factors().is_none() || self.codec.supports_key_factors(),
            "factors for keys in {}",
            self.codec
        );
        self.transform = transform;
    }

    /// The transform of keys, `[heads, dim]`.
    #[must_use]
    pub const fn key_transform(&self) -> &KeyTransform {
        &self.transform
    }

    /// The codec.
    #[must_use]
    pub const fn codec(&self) -> Codec {
        self.codec
    }

    /// `[pages, heads, page, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// The pages as inputs of attention.
    #[must_use]
    pub fn view(&self) -> CodesView<'_> {
        CodesView {
            bytes: &self.memory,
            codec: self.codec,
            coder: &self.coder,
            shape: self.shape,
            columns: self.shape[3],
            transform: &self.transform,
        }
    }

    /// Bytes per page of one head.
    fn page_bytes(&self) -> usize {
        self.shape[2] * self.coder.format().row_bytes()
    }

    fn page_at(&self, page: usize, head: usize) -> Range<usize> {
        let bytes = self.page_bytes();
        let at = (page * self.shape[1] + head) * bytes;
        at..at + bytes
    }

    /// The bytes of a page of one head.
    pub fn bytes_mut(&mut self, page: usize, head: usize) -> &mut [u8] {
        let at = self.page_at(page, head);
        &mut self.memory[at]
    }

    /// The bytes of all pages. A page has its heads one after another.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// Checks that rows of a tensor `[1, heads, rows, dim]` can be stored with a transform `[heads, dim]`.
    ///
    /// # Errors
    /// The reason, and head and row, of the first token that cannot be stored, in the lowest head that has such a token.
    pub fn check(tensor: &TensorView<'_>, transform: &KeyTransform) -> Result<(), (EncodeError, [usize; 2])> {
        let rows = SourceRows { tensor, transform: transform.view() };
        let refused = dispatch::first_refused(IsaToken::best(), &rows);
        refused.map_or(Ok(()), |[head, row]| Err((rows.reason(head, row), [head, row])))
    }

    /// Stores rows `from..` of a tensor `[1, heads, rows, dim]` as rows `rows` of a page. The caller has checked the rows.
    pub fn write(&mut self, page: usize, rows: Range<usize>, tensor: &TensorView<'_>, from: usize) {
        let heads = 0..self.shape[1];
        let bytes = self.page_at(page, heads.start).start..self.page_at(page, heads.end - 1).end;
        let pages = PageRows { bytes: &mut self.memory[bytes], tokens: self.shape[2], rows };
        let rows = SourceRows { tensor, transform: self.transform.view() };
        dispatch::store(
            IsaToken::best(),
            &mut EncodeJob { coder: &self.coder, rule: self.side.rule(), rows, from, pages },
        );
    }

    /// Decodes a row and undoes the transform.
    pub(crate) fn read(&self, page: usize, head: usize, row: usize, x: &mut [f32]) {
        self.view().read(page, head, row, x);
    }

    /// Copies a row out of a page, its planes one after another.
    pub fn export(&self, page: usize, head: usize, row: usize, into: &mut [u8]) {
        self.view().export(page, head, row, into);
    }

    /// Copies an exported row into a page.
    pub fn import(&mut self, page: usize, head: usize, row: usize, from: &[u8]) {
        let at = self.page_at(page, head);
        self.coder.format().scatter(from, self.shape[2], row, &mut self.memory[at]);
    }

    /// Copies rows of a page to the same rows of another page.
    pub(crate) fn copy(&mut self, [from, to]: [usize; 2], rows: Range<usize>) {
        for head in 0..self.shape[1] {
            let (from, to) = (self.page_at(from, head).start, self.page_at(to, head).start);
            for place in self.coder.format().places(self.shape[2], rows.clone()) {
                self.memory.copy_within(from + place.start..from + place.end, to + place.start);
            }
        }
    }

    /// Stores a row of a tensor `[pages, heads, page, dim]`.
    ///
    /// # Errors
    /// [`EncodeError`]; the stored row is unchanged then.
    ///
    /// # Panics
    /// If there is no such row, or `x` does not have the length of a row.
    pub fn store(&mut self, place: [usize; 3], x: &[f32]) -> Result<(), EncodeError> {
        let [pages, heads, page, dim] = self.shape;
        let there = place[0] < pages && place[1] < heads && place[2] < page;
        assert!(there, "row {place:?} of pages {:?}", self.shape);
        assert!(x.len() == dim, "{} elements of rows of {dim}", x.len());
        let tensor = TensorView::bhsd(x, [1, 1, 1, dim]);
        let tensor = &tensor.unwrap_or_else(|_| unreachable!("a row is a tensor"));
        let rows = SourceRows { tensor, transform: self.transform.view().head(place[1], dim) };
        if dispatch::first_refused(IsaToken::best(), &rows).is_some() {
            return Err(rows.reason(0, 0));
        }
        let bytes = self.page_at(place[0], place[1]);
        let pages = PageRows { bytes: &mut self.memory[bytes], tokens: page, rows: place[2]..place[2] + 1 };
        dispatch::store(
            IsaToken::best(),
            &mut EncodeJob { coder: &self.coder, rule: self.side.rule(), rows, from: 0, pages },
        );
        Ok(())
    }

    /// Fills a row of every head with bytes 0xFF, which makes its scale a NaN, or its elements.
    #[cfg(feature = "testkit")]
    pub fn poison(&mut self, page: usize, row: usize) {
        for head in 0..self.shape[1] {
            let at = self.page_at(page, head);
            for place in self.coder.format().places(self.shape[2], row..row + 1) {
                self.memory[at.start + place.start..at.start + place.end].fill(0xFF);
            }
        }
    }
}

/// Borrowed pages of quantized rows.
#[derive(Debug, Clone, Copy)]
pub struct CodesView<'a> {
    bytes: &'a [u8],
    codec: Codec,
    coder: &'a Coder,
    /// Shape of the stored rows.
    shape: [usize; 4],
    /// Elements of a row that the view shows.
    columns: usize,
    transform: &'a KeyTransform,
}

impl<'a> CodesView<'a> {
    /// The codec.
    #[must_use]
    pub const fn codec(&self) -> Codec {
        self.codec
    }

    /// `[pages, heads, page, dim]`. Transform, coder and bytes are of whole stored rows, of which a view of
    /// [first columns](super::KvView::first_columns) shows the first `dim` elements.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        let [pages, heads, page, _] = self.shape;
        [pages, heads, page, self.columns]
    }

    /// The first `columns` elements of every row, which has as many.
    pub(crate) const fn columns(&self, columns: usize) -> Self {
        Self { columns, ..*self }
    }

    /// [`CodesView::shape`], with as many columns as the stored rows have.
    pub(crate) const fn stored_shape(&self) -> [usize; 4] {
        self.shape
    }

    /// Returns true if the rows are the first elements of the rows of `other`, in the same memory.
    #[must_use]
    pub fn is_first_columns_of(&self, other: &Self) -> bool {
        std::ptr::eq(self.bytes, other.bytes)
            && (self.codec, self.shape) == (other.codec, other.shape)
            && self.columns <= other.columns
    }

    /// The transform of stored rows, `[heads, dim]`.
    #[must_use]
    pub const fn key_transform(&self) -> &'a KeyTransform {
        self.transform
    }

    /// The transform of a head.
    fn of_head(&self, head: usize) -> ChannelTransform<'a> {
        self.transform.view().head(head, self.shape[3])
    }

    /// The mean of a head that is subtracted from its rows.
    #[must_use]
    pub fn mean(&self, head: usize) -> Option<&'a [f32]> {
        self.of_head(head).mean
    }

    /// The factors that the rows of a head are divided by, without the mean.
    #[must_use]
    pub fn factors(&self, head: usize) -> Option<&'a [f32]> {
        self.of_head(head).factors
    }

    /// The coder, which decodes the rows.
    #[must_use]
    pub const fn coder(&self) -> &'a Coder {
        self.coder
    }

    /// The bytes of a page of one head.
    pub fn page(&self, page: usize, head: usize) -> &'a [u8] {
        let bytes = self.shape[2] * self.coder.format().row_bytes();
        &self.bytes[(page * self.shape[1] + head) * bytes..][..bytes]
    }

    /// Copies a row out of a page, its planes one after another.
    pub fn export(&self, page: usize, head: usize, row: usize, into: &mut [u8]) {
        self.coder.format().gather(self.page(page, head), self.shape[2], row, into);
    }

    /// Decodes row `[dim]`: rotated back, times the factors, plus the mean.
    pub fn read(&self, page: usize, head: usize, row: usize, x: &mut [f32]) {
        let _env = FloatEnv::ieee();
        let source = (self.page(page, head), self.shape[2], row..row + 1);
        if self.columns == self.shape[3] {
            dispatch::decode(IsaToken::best(), self.coder, source, x);
        } else {
            let mut whole = [0.0f32; MAX_HEAD_DIM];
            dispatch::decode(IsaToken::best(), self.coder, source, &mut whole[..self.shape[3]]);
            x.copy_from_slice(&whole[..self.columns]);
        }
        let ChannelTransform { mean, factors, .. } = self.of_head(head);
        if let Some(factors) = factors {
            x.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
        }
        if let Some(mean) = mean {
            x.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
        }
    }

    /// Like [`CodesView::read`], in f64.
    pub(crate) fn read_f64(&self, page: usize, head: usize, row: usize) -> Vec<f64> {
        let _env = FloatEnv::ieee();
        let dim = self.shape[3];
        let mut x = [0.0f32; MAX_HEAD_DIM];
        // The bytes mean the rotated row in f32. Its products are exact where the value of a code has 8 bits and a scale 11.
        let source = (self.page(page, head), self.shape[2], row..row + 1);
        dispatch::decode_rotated(IsaToken::best(), self.coder, source, &mut x[..dim], dim);
        let mut wide: Vec<f64> = x[..dim].iter().copied().map(f64::from).collect();
        if let Some(rotation) = self.coder.rotation() {
            rotation.undo::<f64, Portable>(&mut wide);
        }
        let ChannelTransform { mean, factors, .. } = self.of_head(head);
        if let Some(factors) = factors {
            wide.iter_mut().zip(factors).for_each(|(x, factor)| *x *= f64::from(*factor));
        }
        if let Some(mean) = mean {
            wide.iter_mut().zip(mean).for_each(|(x, mean)| *x += f64::from(*mean));
        }
        wide.truncate(self.columns);
        wide
    }
}
