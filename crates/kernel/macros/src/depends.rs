//! The dependences of an item, by the paths that the user wrote: functions, tables and structs, and the names
//! of the language, which rustc must resolve to the language's own items.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;

use crate::ir::{Bound, Parameter, Scalar};
use crate::syntax::{module_of, without_lifetimes};

/// The items that an item uses, each once.
#[derive(Debug)]
pub(crate) struct Depends {
    /// The source is in a module beside the item, one module further in than the item's own paths.
    inside: bool,
    items: Vec<Item>,
    /// Constant assertions about the items: without them the printed source would not mean what rustc reads.
    demands: Vec<TokenStream>,
    /// Statements that compile where names of types and traits are the language's own, each once.
    own: Vec<(String, TokenStream)>,
    /// Names of intrinsics that are called, and of scalar types that constants and functions are of, each once.
    names: Vec<syn::Ident>,
}

#[derive(Debug)]
struct Item {
    key: String,
    source: TokenStream,
}

impl Depends {
    /// For an item whose source is in a module beside it.
    pub(crate) fn of_module() -> Depends {
        Depends { inside: true, ..Depends::of_impl() }
    }

    /// For an item whose source is in an `impl` beside it.
    pub(crate) fn of_impl() -> Depends {
        Depends { inside: false, items: Vec::new(), demands: Vec::new(), own: Vec::new(), names: Vec::new() }
    }

    /// A device function or a constant: the path's module of the same name holds its source.
    pub(crate) fn item(&mut self, path: &syn::Path) {
        let module = self.module_path(path);
        let span = path.span();
        let source = quote_spanned!(span=> #module::SOURCE);
        if self.add(source) {
            // The module knows its item's name: a path renamed by `use .. as ..` does not end in it.
            let name = module.segments.last().map(|segment| &segment.ident);
            self.demands.push(quote_spanned!(span=> const _: () = #module::#name;));
        }
    }

    /// A struct, by its type; generic parameters of the item are replaced by arbitrary types and numbers,
    /// because the source is the same for all.
    pub(crate) fn structure(&mut self, path: &syn::Path, generics: &[Parameter]) {
        let mut path = path.clone();
        for segment in &mut path.segments {
            // In a constant, a lifetime that is left out is `'static`.
            segment.arguments = without_lifetimes(&segment.arguments);
            if let syn::PathArguments::AngleBracketed(arguments) = &mut segment.arguments {
                arguments.colon2_token = None;
                for argument in &mut arguments.args {
                    stand_in(argument, generics);
                }
            }
        }
        let span = path.span();
        let path = self.path(&path);
        let source = quote_spanned!(span=> <#path as ::flashtile_kernel::source::Described>::SOURCE);
        if self.add(source.clone()) {
            let name = path.segments.last().map(|segment| segment.ident.to_string());
            // The name of a type alias differs from its struct's.
            self.demands.push(quote_spanned! {span=>
                const _: () = {
                    let (found, written) = (#source.name.as_bytes(), #name.as_bytes());
                    let mut same = found.len() == written.len();
                    let mut n = 0;
                    while same && n < found.len() {
                        same = found[n] == written[n];
                        n += 1;
                    }
                    ::core::assert!(same, "the printed source has the struct's own name: write that, not an alias");
                };
            });
        }
    }

    /// Adds an item, unless it is there.
    fn add(&mut self, source: TokenStream) -> bool {
        let key = source.to_string();
        let new = self.items.iter().all(|item| item.key != key);
        if new {
            self.items.push(Item { key, source });
        }
        new
    }

    /// A path of the item's, as it is written where its source stands.
    fn path(&self, path: &syn::Path) -> syn::Path {
        if self.inside { from_inside(path) } else { path.clone() }
    }

    /// The path without generic arguments: the module beside the item that it names.
    fn module_path(&self, path: &syn::Path) -> syn::Path {
        module_of(&self.path(path))
    }

    /// A call without generic arguments: C++ must be able to deduce them.
    pub(crate) fn deducible(&mut self, path: &syn::Path) {
        let module = self.module_path(path);
        self.demand(
            path.span(),
            quote_spanned!(path.span()=> #module::DEDUCIBLE),
            "C++ cannot deduce the generic arguments of this call: write them, `f::<..>(..)`",
        );
    }

    /// A literal as an argument: its type must not be a parameter of the function, which C++ would deduce anew.
    pub(crate) fn typed_argument(&mut self, path: &syn::Path, argument: usize, span: Span) {
        let module = self.module_path(path);
        self.demand(
            span,
            quote_spanned!(span=> #module::DEDUCED >> #argument & 1 == 0),
            "the function is generic in this argument and C++ would take the literal for an `int`: give it a suffix",
        );
    }

    /// A call beside other operands, which C++ may evaluate before or after it: no barrier may change what they read.
    pub(crate) fn without_barrier(&mut self, path: &syn::Path) {
        let module = self.module_path(path);
        self.demand(
            path.span(),
            quote_spanned!(path.span()=> !#module::HAS_BARRIER),
            "the function has a barrier, and C++ may call it before or after it evaluates the rest of the expression: bind its result first, `let x = ..`",
        );
    }

    fn demand(&mut self, span: Span, condition: TokenStream, message: &str) {
        self.demands.push(quote_spanned!(span=> const _: () = ::core::assert!(#condition, #message);));
    }

    /// The sources.
    pub(crate) fn sources(&self) -> Vec<&TokenStream> {
        self.items.iter().map(|item| &item.source).collect()
    }

    /// A scalar type, by its name or its path.
    pub(crate) fn own_scalar(&mut self, path: &syn::Path, scalar: Scalar) {
        let name = syn::Ident::new(&scalar.rust(), path.span());
        let ours = match scalar {
            Scalar::F16 | Scalar::Bf16 => quote!(::flashtile_kernel::#name),
            _ => quote!(::core::primitive::#name),
        };
        self.own_type(path, &ours);
    }

    /// `Buffer`, `Shared` or `Fragment`. It is the same type for every element.
    pub(crate) fn own_generic(&mut self, path: &syn::Path) {
        let mut path = module_of(path);
        let Some(last) = path.segments.last_mut() else { return };
        let (name, span) = (last.ident.clone(), last.ident.span());
        let element = syn::parse_quote_spanned!(span=> <::core::primitive::f32>);
        last.arguments = syn::PathArguments::AngleBracketed(element);
        self.own_type(&path, &quote_spanned!(span=> ::flashtile_kernel::#name<::core::primitive::f32>));
    }

    fn own_type(&mut self, path: &syn::Path, ours: &TokenStream) {
        let (span, path) = (path.span(), self.path(path));
        self.add_own(&path, quote_spanned!(span=> ::flashtile_kernel::ops::own::<#path, #ours>();));
    }

    /// The bound of a type parameter.
    pub(crate) fn own_bound(&mut self, path: &syn::Path, bound: Bound) {
        let (span, path) = (path.span(), self.path(path));
        let ours = match bound {
            Bound::Scalar => quote_spanned!(span=> ::flashtile_kernel::Scalar),
            Bound::Number => quote_spanned!(span=> ::flashtile_kernel::Number),
            Bound::Element => quote_spanned!(span=> ::flashtile_kernel::Element),
        };
        let check = quote_spanned! {span=>
            {
                #[allow(dead_code)]
                fn ft_users<T: #path>() {
                    fn ft_ours<T: #ours>() {}
                    ft_ours::<T>();
                }
            }
        };
        self.add_own(&path, check);
    }

    fn add_own(&mut self, path: &syn::Path, check: TokenStream) {
        let key = path.to_token_stream().to_string();
        if self.own.iter().all(|(found, _)| *found != key) {
            self.own.push((key, check));
        }
    }

    /// An intrinsic function. The native function calls the language's own by its path, as the printed source does.
    pub(crate) fn own_name(&mut self, name: &syn::Ident) {
        if !self.names.contains(name) {
            self.names.push(name.clone());
        }
    }

    /// A scalar type that a constant or a function is of: a module of its name would come before it.
    pub(crate) fn own_owner(&mut self, path: &syn::Path, scalar: Scalar) {
        self.own_scalar(path, scalar);
        if let Some(name) = path.get_ident() {
            self.own_name(name);
        }
    }

    /// Constants that compile where the items and the names mean what the printed source says.
    pub(crate) fn demands(&self) -> TokenStream {
        let (demands, names) = (&self.demands, self.names.iter());
        let own = self.own.iter().map(|(_, check)| check);
        let own = (!self.own.is_empty()).then(|| quote!(const _: fn() = || { #(#own)* };));
        // A name that two globs import is ambiguous, unless it is one item.
        let user = if self.inside { quote!(super::super) } else { quote!(super) };
        let names = (!self.names.is_empty()).then(|| {
            quote! {
                const _: () = {
                    #[allow(unused_imports)]
                    mod ft_names {
                        use #user::*;
                        use ::core::primitive::*;
                        use ::flashtile_kernel::prelude::*;
                        #(use self::#names as _;)*
                    }
                };
            }
        });
        quote!(#(#demands)* #own #names)
    }
}

/// The path as it is written one module further in.
pub(crate) fn from_inside(path: &syn::Path) -> syn::Path {
    let mut path = path.clone();
    if path.leading_colon.is_some() {
        return path;
    }
    let Some(first) = path.segments.first_mut() else { return path };
    if first.ident == "self" {
        first.ident = syn::Ident::new("super", first.ident.span());
    } else if first.ident == "super" {
        let outer = syn::PathSegment::from(syn::Ident::new("super", first.ident.span()));
        path.segments.insert(0, outer);
    }
    path
}

/// Replaces a generic argument that names a parameter of the item.
fn stand_in(argument: &mut syn::GenericArgument, generics: &[Parameter]) {
    let tokens = argument.to_token_stream();
    let span = argument.span();
    let replacement = generics.iter().find(|parameter| mentions(&tokens, parameter.name())).map(
        |parameter| match parameter {
            Parameter::Type { .. } => quote_spanned!(span=> f32),
            Parameter::Const { ty: Scalar::Bool, .. } => quote_spanned!(span=> false),
            Parameter::Const { .. } => quote_spanned!(span=> 1),
        },
    );
    if let Some(Ok(replacement)) = replacement.map(syn::parse2) {
        *argument = replacement;
    }
}

/// Returns true if tokens contain a name.
pub(crate) fn mentions(tokens: &TokenStream, name: &str) -> bool {
    tokens.clone().into_iter().any(|token| match token {
        proc_macro2::TokenTree::Ident(ident) => ident == name,
        proc_macro2::TokenTree::Group(group) => mentions(&group.stream(), name),
        _ => false,
    })
}
