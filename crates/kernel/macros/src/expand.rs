//! The output of the attributes: the item, its `ItemSource`, and for functions and constants a module of the
//! same name that holds it.

use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};

use crate::depends::{Depends, from_inside};
use crate::errors::Errors;
use crate::ir::{Field, Function, Parameter, Passed, Scalar, Struct, Type};
use crate::lower::{self, Context};
use crate::syntax;
use crate::types::{self, Reader};
use crate::{names, native, print, signature, source};

/// The C++ of an item, with its name and kind.
pub(crate) struct Printed<'a> {
    pub(crate) name: &'a Ident,
    pub(crate) kind: &'static str,
    pub(crate) cpp: TokenStream,
    pub(crate) rust: String,
}

/// The `ItemSource` of an item.
pub(crate) fn item_source(printed: &Printed<'_>, sources: &[&TokenStream]) -> TokenStream {
    let Printed { name, kind, cpp, rust } = printed;
    let kind = format_ident!("{kind}");
    let spelled = name.to_string();
    let symbol = names::global(&spelled);
    let line = u32::try_from(name.span().start().line).unwrap_or_default();
    quote! {
        ::flashtile_kernel::ItemSource {
            name: #spelled,
            symbol: #symbol,
            kind: ::flashtile_kernel::source::ItemKind::#kind,
            cpp: #cpp,
            rust: #rust,
            depends: &[#(#sources),*],
            module: ::core::module_path!(),
            file: ::core::file!(),
            line: #line,
        }
    }
}

fn printed(cpp: &str) -> TokenStream {
    quote!(::flashtile_kernel::source::Cpp::Printed(#cpp))
}

/// Documentation, a line each.
pub(crate) fn docs(attributes: &[syn::Attribute]) -> Vec<String> {
    let mut lines = Vec::new();
    for attribute in attributes {
        if let syn::Meta::NameValue(meta) = &attribute.meta
            && let (true, syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. })) =
                (meta.path.is_ident("doc"), &meta.value)
        {
            lines.extend(text.value().lines().map(str::to_string));
        }
    }
    lines
}

/// Refuses attributes that would change the Rust item and not the printed one.
pub(crate) fn attributes(attributes: &[syn::Attribute], known: &[&str], errors: &mut Errors) {
    for attribute in attributes {
        if !syntax::is_lint(attribute) && !known.iter().any(|name| attribute.path().is_ident(name)) {
            errors.refuse(attribute, "this attribute would be lost in the printed texts: leave it out");
        }
    }
}

/// Lints that look at what a body has become, not at what its author wrote.
fn native_lints() -> TokenStream {
    quote!(#[allow(
        unused_parens,
        unused_braces,
        clippy::blocks_in_conditions,
        clippy::double_parens,
        clippy::let_and_return,
        clippy::manual_is_multiple_of,
        clippy::unnecessary_cast
    )])
}

/// Lints on the function of a kernel, which has a parameter for each buffer of a launch.
pub(crate) fn entry_lints() -> TokenStream {
    quote!(#[allow(clippy::too_many_arguments)])
}

/// Lints on a module beside an item: its visibility is the item's, and its numbers stand where the user's do.
pub(crate) fn module_lints() -> TokenStream {
    quote!(#[allow(
        non_snake_case,
        non_upper_case_globals,
        unreachable_pub,
        unused_imports,
        clippy::zero_prefixed_literal
    )])
}

/// The body of a native function.
pub(crate) enum NativeBody<'a> {
    /// No body, as something was refused: rustc would report code that only the language accepts as wrong
    /// Rust.
    Absent,
    /// A `const fn`, which rustc evaluates too.
    AsWritten(&'a syn::Block),
    /// The function's own, with the operators of the simulator.
    Checked { lowered: &'a lower::Lowered, has_result: bool },
}

/// The function that the simulator calls.
pub(crate) fn native_function(function: &syn::ItemFn, body: &NativeBody<'_>) -> TokenStream {
    let syn::ItemFn { attrs, vis, sig, block } = function;
    let lints = native_lints();
    let (unused, body) = match body {
        NativeBody::Absent => (
            Some(quote!(#[allow(unused, clippy::all)])),
            quote!({ ::core::panic!("a refused function of the kernel language") }),
        ),
        NativeBody::AsWritten(block) => (None, native::with_own_asserts(block).to_token_stream()),
        NativeBody::Checked { lowered, has_result } => (None, native::body(block, *has_result, lowered)),
    };
    quote!(#(#attrs)* #lints #unused #vis #sig #body)
}

/// `#[device]`.
pub(crate) fn device(arguments: &TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    if !arguments.is_empty() {
        errors.refuse(arguments, "`#[device]` has no arguments");
    }
    match syn::parse2(item.clone()) {
        Ok(syn::Item::Fn(function)) => device_function(function, item, errors),
        Ok(syn::Item::Struct(structure)) => device_struct(structure, item, errors),
        Ok(other) => {
            errors.refuse(&other, "`#[device]` is for functions and structs");
            with_errors(errors, other.to_token_stream())
        }
        Err(error) => {
            errors.add(error);
            with_errors(errors, item)
        }
    }
}

/// The item beside its errors, to leave no second error where it is used.
pub(crate) fn with_errors(errors: Errors, item: TokenStream) -> TokenStream {
    let errors = errors.into_tokens();
    quote!(#item #errors)
}

fn device_function(mut function: syn::ItemFn, item: TokenStream, mut errors: Errors) -> TokenStream {
    attributes(&function.attrs, &["inline", "must_use"], &mut errors);
    let mut depends = Depends::of_module();
    let signature = signature::read(&mut function, false, &mut errors, &mut depends);
    let signature::Signature { generics, mut arguments, result } = signature;
    let rust_name = function.sig.ident.to_string();
    let context = Context {
        errors: &mut errors,
        depends: &mut depends,
        generics: &generics,
        name: &rust_name,
        kernel: false,
        result: result.as_ref(),
    };
    let written = function.block.clone();
    let lowered = lower::body(context, &mut arguments, &mut function.block);
    if !errors.is_empty() {
        return with_errors(errors, native_function(&function, &NativeBody::Absent));
    }
    let body = match function.sig.constness {
        Some(_) => NativeBody::AsWritten(&written),
        None => NativeBody::Checked { lowered: &lowered, has_result: result.is_some() },
    };
    let native = native_function(&function, &body);
    let is_convergent = lowered.convergence.is_convergent(from_inside);
    let has_barrier = lowered.convergence.has_barrier(from_inside);
    let arguments: Vec<_> = arguments.into_iter().map(|(_, argument)| argument).collect();
    let deduced = arguments.iter().enumerate().fold(0u64, |deduced, (n, argument)| {
        let bare = matches!(&argument.ty, Type::Parameter(_)) && n < 64;
        if bare { deduced | 1 << n } else { deduced }
    });
    let deducible = generics
        .iter()
        .all(|parameter| arguments.iter().any(|argument| mentions(&argument.ty, parameter.name())));
    let cpp = print::function(&Function {
        name: names::global(&rust_name),
        docs: docs(&function.attrs),
        generics,
        arguments,
        result,
        body: lowered.body,
    });
    let name = &function.sig.ident;
    let rust = source::of(item);
    let item_source =
        item_source(&Printed { name, kind: "Function", cpp: printed(&cpp), rust }, &depends.sources());
    let (vis, lints, demands) = (&function.vis, module_lints(), depends.demands());
    quote! {
        #native
        #[doc(hidden)]
        #lints
        #vis mod #name {
            use super::*;
            pub const SOURCE: &::flashtile_kernel::ItemSource = &#item_source;
            pub const DEDUCED: u64 = #deduced;
            pub const DEDUCIBLE: bool = #deducible;
            pub const IS_CONVERGENT: bool = #is_convergent;
            pub const HAS_BARRIER: bool = #has_barrier;
            pub const #name: () = ();
            #demands
        }
    }
}

/// Returns true if C++ can deduce a parameter from an argument of a type.
fn mentions(of: &Type, name: &str) -> bool {
    use crate::ir::{Generic, Kind};
    let is_name =
        |value: &crate::ir::Expr| matches!(&value.kind, Kind::Name { name: found, .. } if found == name);
    match of {
        Type::Scalar(_) => false,
        Type::Parameter(found) => found == name,
        Type::Array(element, length) => mentions(element, name) || is_name(length),
        Type::Struct(_, arguments) => arguments.iter().any(|argument| match argument {
            Generic::Type(of) => mentions(of, name),
            Generic::Const(value) => is_name(value),
        }),
        Type::Fragment(element) | Type::Buffer(element) | Type::Shared(element) => mentions(element, name),
    }
}

/// The fields of a struct. With `buffers`, a field may be `&'a Buffer<T>`.
fn fields(structure: &syn::ItemStruct, buffers: bool, reader: &mut Reader<'_>) -> Vec<Field> {
    let syn::Fields::Named(named) = &structure.fields else {
        reader.errors.refuse(structure, "structs of the kernel language have named fields");
        return Vec::new();
    };
    if named.named.is_empty() {
        reader.errors.refuse(structure, "C++ has no empty structs: give it a field");
    }
    let mut fields = Vec::new();
    for field in &named.named {
        attributes(&field.attrs, &[], reader.errors);
        let Some(ident) = &field.ident else { continue };
        let name = ident.to_string();
        if let Some(reason) = names::refused(&name) {
            reader.errors.refuse(ident, reason);
        }
        let read = match &field.ty {
            syn::Type::Reference(reference) if buffers && is_memory(&reference.elem) => {
                buffer(reference, reader)
            }
            by_value => value(by_value, reader),
        };
        let Some(ty) = read else { continue };
        fields.push(Field { docs: docs(&field.attrs), name: names::field(&name), ty });
    }
    fields
}

/// Returns true if a type is `Buffer` or `Shared`.
fn is_memory(ty: &syn::Type) -> bool {
    let syn::Type::Path(path) = ty else { return false };
    path.path.segments.last().is_some_and(|segment| segment.ident == "Buffer" || segment.ident == "Shared")
}

/// The type of a field `&'a Buffer<T>`.
fn buffer(reference: &syn::TypeReference, reader: &mut Reader<'_>) -> Option<Type> {
    match reader.read(&reference.elem)? {
        ty @ Type::Buffer(_) if reference.mutability.is_none() => Some(ty),
        _ => {
            let reason = "a struct holds buffers that are read, `&'a Buffer<T>`: pass other memory by itself";
            reader.errors.refuse(reference, reason);
            None
        }
    }
}

/// The type of a field that is a value.
fn value(written: &syn::Type, reader: &mut Reader<'_>) -> Option<Type> {
    let ty = reader.read(written)?;
    if matches!(ty, Type::Buffer(_) | Type::Shared(_)) {
        reader.errors.refuse(written, "memory is passed to functions by reference: hold an index");
    }
    Some(ty)
}

fn struct_name(structure: &syn::ItemStruct, errors: &mut Errors) {
    let name = structure.ident.to_string();
    if let Some(reason) = names::refused_item(&name) {
        errors.refuse(&structure.ident, reason);
    }
    if Scalar::of(&name).is_some() || matches!(name.as_str(), "Buffer" | "Shared" | "Fragment") {
        errors.refuse(&structure.ident, "a type of the kernel language has this name: choose another");
    }
}

/// The traits that a user's `derive`s list.
fn derives(attributes: &[syn::Attribute], errors: &mut Errors) -> Vec<String> {
    let mut all = Vec::new();
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let result = attribute.parse_nested_meta(|meta| {
            all.extend(meta.path.segments.last().map(|segment| segment.ident.to_string()));
            Ok(())
        });
        errors.keep(result);
    }
    all
}

fn device_struct(structure: syn::ItemStruct, item: TokenStream, mut errors: Errors) -> TokenStream {
    attributes(&structure.attrs, &["derive"], &mut errors);
    struct_name(&structure, &mut errors);
    // C++ has no lifetimes: buffers are pointers there.
    let mut printed_generics = structure.generics.clone();
    printed_generics.params = printed_generics
        .params
        .into_iter()
        .filter(|parameter| !matches!(parameter, syn::GenericParam::Lifetime(_)))
        .collect();
    let mut depends = Depends::of_impl();
    let generics = types::generics(&printed_generics, &mut errors, &mut depends);
    let reader = &mut Reader { errors: &mut errors, depends: &mut depends, generics: &generics };
    let fields = fields(&structure, true, reader);
    let derived = derives(&structure.attrs, &mut errors);
    let missing =
        ["Clone", "Copy", "Debug"].into_iter().filter(|name| !derived.iter().any(|found| found == name));
    let missing = missing.map(|name| match name {
        "Clone" => quote!(::core::clone::Clone),
        "Copy" => quote!(::core::marker::Copy),
        _ => quote!(::core::fmt::Debug),
    });
    let structure_with_derives = quote!(#[derive(#(#missing),*)] #structure);
    if !errors.is_empty() {
        return with_errors(errors, structure_with_derives);
    }
    let name = &structure.ident;
    let cpp = print::structure(
        &Struct { name: names::global(&name.to_string()), docs: docs(&structure.attrs), generics, fields },
        false,
    );
    let rust = source::of(item);
    let item_source =
        item_source(&Printed { name, kind: "Struct", cpp: printed(&cpp), rust }, &depends.sources());
    let (implementation, ty, _) = structure.generics.split_for_impl();
    let demands = depends.demands();
    quote! {
        #structure_with_derives
        #demands
        impl #implementation ::flashtile_kernel::Value for #name #ty {}
        impl #implementation ::flashtile_kernel::source::Described for #name #ty {
            const SOURCE: &'static ::flashtile_kernel::ItemSource = &#item_source;
        }
    }
}

/// `#[params]`.
pub(crate) fn params(arguments: &TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    if !arguments.is_empty() {
        errors.refuse(arguments, "`#[params]` has no arguments");
    }
    let structure: syn::ItemStruct = match syn::parse2(item.clone()) {
        Ok(structure) => structure,
        Err(error) => {
            errors.add(error);
            return with_errors(errors, item);
        }
    };
    attributes(&structure.attrs, &["derive"], &mut errors);
    struct_name(&structure, &mut errors);
    if !structure.generics.params.is_empty() {
        errors.refuse(
            &structure.generics,
            "structs of parameters have no generics: the host lays them out once",
        );
    }
    let mut depends = Depends::of_impl();
    let reader = &mut Reader { errors: &mut errors, depends: &mut depends, generics: &[] };
    let fields = fields(&structure, false, reader);
    for (field, written) in fields.iter().zip(&structure.fields) {
        if !is_of_words(&field.ty) {
            errors.refuse(&written.ty, "parameters are u32, i32, u64, i64, usize, f32 and arrays of them, which every device lays out alike");
        }
    }
    if !errors.is_empty() {
        return with_errors(errors, structure.to_token_stream());
    }
    let name = &structure.ident;
    let spelled = name.to_string();
    let cpp = print::structure(
        &Struct { name: names::global(&spelled), docs: docs(&structure.attrs), generics: Vec::new(), fields },
        true,
    );
    let rust = source::of(item);
    let item_source =
        item_source(&Printed { name, kind: "Struct", cpp: printed(&cpp), rust }, &depends.sources());
    let (demands, layout) = (depends.demands(), layout(&structure));
    quote! {
        #[repr(C)]
        #structure
        #demands
        #layout
        impl ::flashtile_kernel::source::Described for #name {
            const SOURCE: &'static ::flashtile_kernel::ItemSource = &#item_source;
        }
    }
}

/// Returns true if every device lays out a type alike: numbers of 4 or 8 bytes, and arrays of them.
fn is_of_words(ty: &Type) -> bool {
    match ty {
        Type::Array(element, _) => is_of_words(element),
        Type::Scalar(scalar) => {
            scalar.is_integer() && !matches!(scalar, Scalar::U8 | Scalar::I8 | Scalar::U16 | Scalar::I16)
                || *scalar == Scalar::F32
        }
        _ => false,
    }
}

/// The bytes of a struct of parameters, and the assertion that there is no padding among them.
fn layout(structure: &syn::ItemStruct) -> TokenStream {
    let name = &structure.ident;
    let members: Vec<_> = structure.fields.iter().filter_map(|field| field.ident.as_ref()).collect();
    let member_types: Vec<_> = structure.fields.iter().map(|field| &field.ty).collect();
    let plain = quote!(::flashtile_kernel::Plain);
    let asserts = members.iter().enumerate().map(|(n, member)| {
        let before = match &member_types[..n] {
            [] => quote!(0),
            [first, rest @ ..] => quote!(<#first as #plain>::BYTES #(+ <#rest as #plain>::BYTES)*),
        };
        let message = format!("{name}: there is padding before {member}: put fields of 8 bytes first");
        quote_spanned! {member.span()=>
            ::core::assert!(::core::mem::offset_of!(#name, #member) == #before, #message);
        }
    });
    let end = format!("{name}: there is padding at the end: add a field");
    let fields = members.iter().zip(&member_types).map(|(member, ty)| {
        let written = member.to_string();
        quote!(::flashtile_kernel::ParamsField {
            name: #written,
            element: <#ty as ::flashtile_kernel::Words>::ELEMENT,
            len: <#ty as ::flashtile_kernel::Words>::LEN,
            offset: ::core::mem::offset_of!(#name, #member),
        })
    });
    quote! {

        const _: () = {
            #(#asserts)*
            ::core::assert!(::core::mem::size_of::<#name>() == <#name as #plain>::BYTES, #end);
        };
        impl #plain for #name {
            const BYTES: ::core::primitive::usize = #(<#member_types as #plain>::BYTES)+*;
            const FIELDS: &'static [::flashtile_kernel::ParamsField] = &[#(#fields),*];
            fn write(&self, ft_bytes: &mut ::std::vec::Vec<::core::primitive::u8>) {
                #(#plain::write(&self.#members, ft_bytes);)*
            }
            fn read(ft_bytes: &mut &[::core::primitive::u8]) -> Self {
                Self { #(#members: #plain::read(ft_bytes)),* }
            }
        }
    }
}

/// `#[constant]`.
pub(crate) fn constant(arguments: &TokenStream, item: TokenStream) -> TokenStream {
    let mut errors = Errors::default();
    if !arguments.is_empty() {
        errors.refuse(arguments, "`#[constant]` has no arguments");
    }
    let constant: syn::ItemConst = match syn::parse2(item.clone()) {
        Ok(constant) => constant,
        Err(error) => {
            errors.add(error);
            return with_errors(errors, item);
        }
    };
    attributes(&constant.attrs, &[], &mut errors);
    let name = &constant.ident;
    let spelled = name.to_string();
    if let Some(reason) = names::refused_item(&spelled) {
        errors.refuse(name, reason);
    }
    let (element, length) = match &*constant.ty {
        syn::Type::Array(array) => (&*array.elem, Some(&array.len)),
        scalar => (scalar, None),
    };
    let is_scalar = match element {
        syn::Type::Path(path) => {
            path.path.segments.last().is_some_and(|segment| Scalar::of(&segment.ident.to_string()).is_some())
        }
        _ => false,
    };
    if !is_scalar {
        errors.refuse(&constant.ty, "constants are scalars and arrays `[T; N]` of scalars: f32, u32, ..");
    }
    if !errors.is_empty() {
        return with_errors(errors, constant.to_token_stream());
    }
    let length = match length {
        Some(_) => quote!(::core::option::Option::Some(super::#name.len())),
        None => quote!(::core::option::Option::None),
    };
    let cpp = quote! {
        ::flashtile_kernel::source::Cpp::Table {
            element: <#element as ::flashtile_kernel::Scalar>::TYPE,
            len: #length,
            literals: || ::flashtile_kernel::source::Constants::literals(&super::#name),
        }
    };
    let item_source = item_source(&Printed { name, kind: "Constant", cpp, rust: source::of(item) }, &[]);
    let (vis, lints) = (&constant.vis, module_lints());
    quote! {
        #constant
        #[doc(hidden)]
        #lints
        #vis mod #name {
            use super::*;
            pub const SOURCE: &::flashtile_kernel::ItemSource = &#item_source;
            pub const #name: () = ();
        }
    }
}

/// The `ParameterKind` of a kernel's argument in the data of the kernel.
pub(crate) fn parameter_kind(
    ty: &Type,
    passed: &Passed,
    written: &syn::Type,
    generics: &[Parameter],
) -> TokenStream {
    match (ty, passed) {
        (Type::Buffer(element), passed) => {
            let element = element_type(element, generics);
            let writable = *passed == Passed::MemoryMut;
            quote!(ft_source::ParameterKind::Buffer { element: #element, writable: #writable })
        }
        (Type::Struct(name, _), _) => {
            let path = referent(written);
            quote!(ft_source::ParameterKind::Params {
                cpp: #name,
                bytes: <#path as ::flashtile_kernel::Plain>::BYTES,
                fields: <#path as ::flashtile_kernel::Plain>::FIELDS,
            })
        }
        (_, passed) => {
            let kind = format_ident!("{}", if *passed == Passed::Constant { "Constant" } else { "Scalar" });
            quote!(ft_source::ParameterKind::#kind(<#written as ::flashtile_kernel::Scalar>::TYPE))
        }
    }
}

/// The type behind a reference, as it is written inside the kernel's module.
pub(crate) fn referent(ty: &syn::Type) -> TokenStream {
    match ty {
        syn::Type::Reference(reference) => referent(&reference.elem),
        syn::Type::Path(path) if path.qself.is_none() => from_inside(&path.path).to_token_stream(),
        other => other.to_token_stream(),
    }
}

/// The type of the elements of memory.
pub(crate) fn element_type(element: &Type, generics: &[Parameter]) -> TokenStream {
    match element {
        Type::Parameter(name) => {
            let n = generics.iter().position(|parameter| parameter.name() == name);
            let n = n.unwrap_or_default();
            quote!(ft_source::ElementType::Generic(#n))
        }
        Type::Scalar(scalar) => {
            let variant = format_ident!("{}", scalar.variant());
            quote!(ft_source::ElementType::Scalar(::flashtile_kernel::ScalarType::#variant))
        }
        _ => TokenStream::new(),
    }
}
