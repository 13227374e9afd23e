//! The signature of a function: names, generics, arguments, result.

use syn::spanned::Spanned;

use crate::depends::Depends;
use crate::errors::Errors;
use crate::intrinsics;
use crate::ir::{Argument, Parameter, Passed, Scalar, Type};
use crate::names;
use crate::types::{self, Reader};

/// A signature after the check.
pub(crate) struct Signature {
    pub(crate) generics: Vec<Parameter>,
    /// Rust names and arguments.
    pub(crate) arguments: Vec<(String, Argument)>,
    pub(crate) result: Option<Type>,
}

/// Reads the signature of a function, and takes the language's own attributes off its arguments.
pub(crate) fn read(
    function: &mut syn::ItemFn,
    kernel: bool,
    errors: &mut Errors,
    depends: &mut Depends,
) -> Signature {
    let signature = &mut function.sig;
    let name = signature.ident.to_string();
    if let Some(reason) = names::refused_item(&name) {
        errors.refuse(&signature.ident, reason);
    } else if intrinsics::function(&name).is_some() || name == "shared" {
        errors.refuse(&signature.ident, "an intrinsic of the kernel language has this name: choose another");
    }
    let keywords = [
        (
            signature.constness.filter(|_| kernel).map(|token| token.span()),
            "leave out `const`: kernels are launched",
        ),
        (signature.asyncness.map(|token| token.span()), "there is no `async` on GPUs"),
        (
            signature.unsafety.map(|token| token.span()),
            "nothing in the kernel language is unsafe: leave it out",
        ),
        (signature.abi.as_ref().map(Spanned::span), "the function has no ABI: leave it out"),
        (signature.variadic.as_ref().map(Spanned::span), "the function has a fixed number of arguments"),
    ];
    for (span, reason) in keywords {
        if let Some(span) = span {
            errors.refuse_at(span, reason);
        }
    }
    let generics = types::generics(&signature.generics, errors, depends);
    let mut reader = Reader { errors, depends, generics: &generics };
    let mut arguments = Vec::new();
    for input in &mut signature.inputs {
        match input {
            syn::FnArg::Receiver(receiver) => {
                reader
                    .errors
                    .refuse(receiver, "methods are not part of the kernel language: write a function");
            }
            syn::FnArg::Typed(typed) => {
                let constant = take_constant(&mut typed.attrs, reader.errors);
                arguments.extend(argument(typed, constant, kernel, &mut reader));
            }
        }
    }
    let result = match &signature.output {
        syn::ReturnType::Default => None,
        syn::ReturnType::Type(_, ty) if kernel => {
            reader.errors.refuse(ty, "a kernel returns nothing: write to a buffer");
            None
        }
        syn::ReturnType::Type(_, ty) => match &**ty {
            syn::Type::Tuple(tuple) if tuple.elems.is_empty() => None,
            syn::Type::Never(_) => {
                reader.errors.refuse(ty, "a function returns on GPUs");
                None
            }
            other => match reader.read(other) {
                Some(Type::Buffer(_) | Type::Shared(_)) => {
                    reader.errors.refuse(ty, "memory cannot be returned: return values or indices");
                    None
                }
                result => result,
            },
        },
    };
    Signature { generics, arguments, result }
}

/// Takes `#[constant]` off an argument.
fn take_constant(attributes: &mut Vec<syn::Attribute>, errors: &mut Errors) -> bool {
    let mut constant = false;
    attributes.retain(|attribute| {
        if attribute.path().is_ident("constant") {
            constant = true;
            return false;
        }
        if !crate::syntax::is_lint(attribute) {
            errors.refuse(attribute, "this attribute would be lost: parameters have `#[constant]`");
        }
        true
    });
    constant
}

fn argument(
    typed: &syn::PatType,
    constant: bool,
    kernel: bool,
    reader: &mut Reader<'_>,
) -> Option<(String, Argument)> {
    let syn::Pat::Ident(pattern) = &*typed.pat else {
        reader.errors.refuse(&typed.pat, "patterns are not part of the kernel language: name the parameter");
        return None;
    };
    let name = pattern.ident.to_string();
    if let Some(reason) = names::refused(&name) {
        reader.errors.refuse(&pattern.ident, reason);
    }
    if kernel && matches!(name.as_str(), "groups" | "threads") {
        reader.errors.refuse(&pattern.ident, "a launch has a field of this name: choose another");
    }
    let mutable = pattern.mutability.is_some();
    if kernel && mutable {
        reader.errors.refuse(pattern, "parameters of a kernel are constants: copy it, `let mut x = ..`");
    }
    let (ty, passed) = match &*typed.ty {
        syn::Type::Reference(reference) => {
            if let Some(lifetime) = &reference.lifetime {
                reader.errors.refuse(lifetime, "lifetimes are not part of the kernel language: leave it out");
            }
            let ty = reader.read(&reference.elem)?;
            let passed = match (&ty, reference.mutability.is_some()) {
                (Type::Shared(_), _) if kernel => {
                    reader.errors.refuse(
                        &typed.ty,
                        "a kernel makes its threadgroup arrays: `let mut tile: Shared<f32> = shared(N);`",
                    );
                    return None;
                }
                (Type::Buffer(_) | Type::Shared(_), false) => Passed::Memory,
                (Type::Buffer(_) | Type::Shared(_), true) => Passed::MemoryMut,
                (Type::Struct(..), false) => Passed::Params,
                (_, true) if !kernel => Passed::Reference,
                (_, true) => {
                    reader.errors.refuse(&typed.ty, "a kernel writes to buffers only: `&mut Buffer<T>`");
                    return None;
                }
                (_, false) => {
                    reader.errors.refuse(&typed.ty, "values are passed by value: leave out the `&`");
                    return None;
                }
            };
            (ty, passed)
        }
        by_value => (reader.read(by_value)?, if constant { Passed::Constant } else { Passed::Value }),
    };
    let reason = match (&ty, &passed, kernel) {
        _ if constant && !kernel => Some("`#[constant]` is for parameters of kernels"),
        (Type::Scalar(Scalar::Bool | Scalar::U32 | Scalar::I32 | Scalar::F32), Passed::Constant, _) => None,
        _ if constant => Some("`#[constant]` parameters are bool, u32, i32 or f32"),
        (Type::Buffer(_) | Type::Shared(_), Passed::Value, _) => {
            Some("memory is passed by reference: `&` or `&mut`")
        }
        (Type::Scalar(_), Passed::Value, _) => None,
        (Type::Struct(..), Passed::Value, true) => Some("a struct of parameters is passed by reference: `&`"),
        (_, Passed::Value, true) => Some(
            "a kernel takes buffers, `&` of a #[params] struct, and scalars of one type: put arrays into a #[params] struct",
        ),
        _ => None,
    };
    if let Some(reason) = reason {
        reader.errors.refuse(&typed.ty, reason);
        return None;
    }
    Some((name.clone(), Argument { name, ty, passed, mutable }))
}
