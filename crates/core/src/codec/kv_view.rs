//! Keys or values of a run: elements or quantized rows.

use super::key_transform::{IDENTITY, KeyTransform};
use super::{Codec, CodesView};
use crate::tensor::{TensorView, ViewError};

/// Keys or values of a run: elements of a tensor, or quantized rows in pages.
#[derive(Debug, Clone, Copy)]
pub enum KvView<'a> {
    /// Plain elements.
    Elements(TensorView<'a>),
    /// Quantized rows.
    Codes(CodesView<'a>),
}

impl<'a> KvView<'a> {
    /// The codec.
    #[must_use]
    pub const fn codec(&self) -> Codec {
        match self {
            Self::Elements(view) => Codec::of(view.dtype()),
            Self::Codes(codes) => codes.codec(),
        }
    }

    /// `[batch or pages, heads, rows, dim]`.
    #[must_use]
    pub const fn shape(&self) -> [usize; 4] {
        match self {
            Self::Elements(view) => view.shape(),
            Self::Codes(codes) => codes.shape(),
        }
    }

    /// The transform of stored rows before they were encoded.
    #[must_use]
    pub const fn key_transform(&self) -> &'a KeyTransform {
        match self {
            Self::Elements(_) => &IDENTITY,
            Self::Codes(codes) => codes.key_transform(),
        }
    }

    /// The first `columns` elements of every row, in the same memory: the values of
    /// [`KvStorage::KeyColumns`](crate::problem::KvStorage::KeyColumns).
    ///
    /// # Errors
    /// [`ViewError::TooSmall`] if rows have fewer elements.
    pub fn first_columns(&self, columns: usize) -> Result<Self, ViewError> {
        let [.., got] = self.shape();
        if columns > got {
            Err(ViewError::TooSmall { needed: columns, got })
        } else {
            Ok(self.columns(columns))
        }
    }

    /// [`KvView::first_columns`] of as many columns as rows have, or fewer.
    pub(crate) const fn columns(&self, columns: usize) -> Self {
        match self {
            Self::Elements(view) => Self::Elements(view.columns(columns)),
            Self::Codes(codes) => Self::Codes(codes.columns(columns)),
        }
    }

    /// [`KvView::shape`], of codes with as many columns as the stored rows have.
    pub(crate) const fn stored_shape(&self) -> [usize; 4] {
        match self {
            Self::Elements(view) => view.shape(),
            Self::Codes(codes) => codes.stored_shape(),
        }
    }

    /// Returns true if the rows are the first elements of the rows of `other`, in the same memory.
    #[must_use]
    pub fn is_first_columns_of(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Elements(view), Self::Elements(other)) => view.is_first_columns_of(other),
            (Self::Codes(codes), Self::Codes(other)) => codes.is_first_columns_of(other),
            (Self::Elements(_), Self::Codes(_)) | (Self::Codes(_), Self::Elements(_)) => false,
        }
    }

    /// The tensor, if rows are plain elements.
    #[must_use]
    pub const fn elements(&self) -> Option<&TensorView<'a>> {
        match self {
            Self::Elements(view) => Some(view),
            Self::Codes(_) => None,
        }
    }
}

impl<'a> From<TensorView<'a>> for KvView<'a> {
    fn from(view: TensorView<'a>) -> Self {
        Self::Elements(view)
    }
}
