//! Errors: each at the span of the refused code, and all of an item at once.

use proc_macro2::{Span, TokenStream};
use quote::ToTokens;

/// The errors of an item.
#[derive(Debug, Default)]
pub(crate) struct Errors {
    all: Vec<syn::Error>,
}

impl Errors {
    /// Refuses the code at `tokens`. The message gives the reason and the replacement.
    pub(crate) fn refuse(&mut self, tokens: &impl ToTokens, message: impl std::fmt::Display) {
        self.all.push(syn::Error::new_spanned(tokens, message));
    }

    pub(crate) fn refuse_at(&mut self, span: Span, message: impl std::fmt::Display) {
        self.all.push(syn::Error::new(span, message));
    }

    pub(crate) fn add(&mut self, error: syn::Error) {
        self.all.push(error);
    }

    /// The value of a step, or nothing and its error kept.
    pub(crate) fn keep<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.add(error);
                None
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All errors as one, in the order in which they were found.
    pub(crate) fn into_error(self) -> Option<syn::Error> {
        self.all.into_iter().reduce(|mut all, next| {
            all.combine(next);
            all
        })
    }

    /// `compile_error!`s at the spans.
    pub(crate) fn into_tokens(self) -> TokenStream {
        self.into_error().map(|error| error.to_compile_error()).unwrap_or_default()
    }
}
