//! Convergent operations, which the threads of a SIMD group or of a threadgroup must reach together.

use std::collections::BTreeMap;

use proc_macro2::TokenStream;
use quote::quote;

use crate::intrinsics::Convergent;

/// The convergent operations of a part of a body: its own, and the ones of device functions that it calls.
#[derive(Clone, Default)]
pub(crate) struct Convergence {
    simd: bool,
    barrier: bool,
    /// The modules beside the device functions, as the user wrote their paths, by their tokens.
    functions: BTreeMap<String, syn::Path>,
}

impl Convergence {
    pub(crate) fn add(&mut self, other: &Convergence) {
        self.simd |= other.simd;
        self.barrier |= other.barrier;
        self.functions.extend(other.functions.clone());
    }

    pub(crate) fn add_intrinsic(&mut self, convergent: Convergent) {
        match convergent {
            Convergent::No => {}
            Convergent::Simd => self.simd = true,
            Convergent::Barrier => self.barrier = true,
        }
    }

    /// Adds a call of a device function, by the module beside it.
    pub(crate) fn add_function(&mut self, module: syn::Path) {
        self.functions.insert(quote!(#module).to_string(), module);
    }

    /// Returns true if there may be a convergent operation, as far as the tokens say: device functions are
    /// not looked into.
    pub(crate) fn is_possible(&self) -> bool {
        self.simd || self.barrier || !self.functions.is_empty()
    }

    /// A constant expression that is true if there is a convergent operation. It reaches the modules of
    /// functions through `module`.
    pub(crate) fn is_convergent(&self, module: impl Fn(&syn::Path) -> syn::Path) -> TokenStream {
        if self.simd || self.barrier {
            return quote!(true);
        }
        let functions = self.functions.values().map(module);
        quote!((false #(|| #functions::IS_CONVERGENT)*))
    }

    /// A constant expression that is true if there is a barrier; otherwise as
    /// [`is_convergent`](Self::is_convergent).
    pub(crate) fn has_barrier(&self, module: impl Fn(&syn::Path) -> syn::Path) -> TokenStream {
        if self.barrier {
            return quote!(true);
        }
        let functions = self.functions.values().map(module);
        quote!((false #(|| #functions::HAS_BARRIER)*))
    }
}
