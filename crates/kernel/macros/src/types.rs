//! Types and generic parameters, read off the tokens.
//!
//! Types hold constant expressions, and expressions hold types: `Reader::constant` is with the expressions, in `lower::constant`.

use crate::depends::Depends;
use crate::errors::Errors;
use crate::intrinsics;
use crate::ir::{Bound, Generic, Parameter, Scalar, Type};
use crate::names;
use crate::syntax::without_lifetimes;

/// Reads types: errors, and the structs and constants that they use, are collected.
pub(crate) struct Reader<'a> {
    pub(crate) errors: &'a mut Errors,
    pub(crate) depends: &'a mut Depends,
    pub(crate) generics: &'a [Parameter],
}

impl Reader<'_> {
    /// The type, or nothing and an error.
    pub(crate) fn read(&mut self, ty: &syn::Type) -> Option<Type> {
        let reason = match ty {
            syn::Type::Path(path) if path.qself.is_none() => return self.path(&path.path),
            syn::Type::Array(array) => {
                let element = self.read(&array.elem)?;
                let length = self.constant(&array.len, Some(Scalar::Usize));
                return Some(Type::Array(Box::new(element), Box::new(length)));
            }
            syn::Type::Paren(inner) => return self.read(&inner.elem),
            syn::Type::Group(inner) => return self.read(&inner.elem),
            syn::Type::Tuple(_) => {
                "tuples are not part of the kernel language: use a #[device] struct or an array"
            }
            syn::Type::Reference(_) => {
                "references are for parameters of functions only: use the value, or an index"
            }
            syn::Type::Slice(_) => {
                "slices are not part of the kernel language: use an array, or memory and an index"
            }
            syn::Type::Ptr(_) => {
                "pointers are not part of the kernel language: use `Buffer` or `Shared` and an index"
            }
            syn::Type::BareFn(_) => "function pointers do not exist on GPUs: call the function",
            syn::Type::ImplTrait(_) | syn::Type::TraitObject(_) => {
                "trait objects do not exist on GPUs: use a type parameter bounded by `Element`"
            }
            syn::Type::Infer(_) => "C++ has no `_`: write the type",
            _ => {
                "the kernel language has scalars, arrays, #[device] structs, `Fragment`, `Buffer` and `Shared`"
            }
        };
        self.errors.refuse(ty, reason);
        None
    }

    fn path(&mut self, path: &syn::Path) -> Option<Type> {
        let last = path.segments.last()?;
        let name = last.ident.to_string();
        let plain = last.arguments.is_none();
        if path.segments.len() == 1 && plain {
            if let Some(scalar) = Scalar::of(&name) {
                self.depends.own_scalar(path, scalar);
                return Some(Type::Scalar(scalar));
            }
            match self.generics.iter().find(|parameter| parameter.name() == name) {
                Some(Parameter::Type { .. }) => return Some(Type::Parameter(name)),
                Some(Parameter::Const { .. }) => {
                    self.errors.refuse(path, "this is a number, not a type");
                    return None;
                }
                None => {}
            }
            let reason = match name.as_str() {
                "f64" => Some("f64 does not exist on Apple's GPUs: use f32"),
                "isize" => Some("isize differs between machines: use i32 or i64"),
                "i128" | "u128" => Some("GPUs have no 128-bit integers: use two u64"),
                "char" => Some("char does not exist on GPUs: use u32"),
                "str" | "String" => Some("strings do not exist on GPUs"),
                "Self" => Some("functions of the kernel language have no `Self`: write the type"),
                _ => None,
            };
            if let Some(reason) = reason {
                self.errors.refuse(path, reason);
                return None;
            }
        }
        // A scalar by its path, as in `half::f16`.
        if let Some(scalar) = Scalar::of(&name).filter(|_| path.segments.len() > 1 && plain) {
            self.depends.own_scalar(path, scalar);
            return Some(Type::Scalar(scalar));
        }
        let handle: Option<fn(Box<Type>) -> Type> = match name.as_str() {
            "Buffer" => Some(Type::Buffer),
            "Shared" => Some(Type::Shared),
            "Fragment" => Some(Type::Fragment),
            _ => None,
        };
        let arguments = self.arguments(&without_lifetimes(&last.arguments))?;
        if let Some(handle) = handle {
            self.depends.own_generic(path);
            return match arguments.into_iter().next() {
                Some(Generic::Type(element @ (Type::Scalar(_) | Type::Parameter(_)))) => {
                    Some(handle(Box::new(element)))
                }
                _ => {
                    self.errors.refuse(
                        path,
                        format_args!("`{name}` holds scalars: write their type, `{name}<f32>`"),
                    );
                    None
                }
            };
        }
        for segment in path.segments.iter().rev().skip(1) {
            if !segment.arguments.is_none() {
                self.errors
                    .refuse(segment, "associated types are not part of the kernel language: write the type");
                return None;
            }
        }
        self.depends.structure(path, self.generics);
        Some(Type::Struct(names::global(&name), arguments))
    }

    /// Generic arguments, of a type or of a call.
    pub(crate) fn arguments(&mut self, arguments: &syn::PathArguments) -> Option<Vec<Generic>> {
        let arguments = match arguments {
            syn::PathArguments::None => return Some(Vec::new()),
            syn::PathArguments::AngleBracketed(arguments) => arguments,
            syn::PathArguments::Parenthesized(_) => {
                self.errors.refuse(arguments, "closures and function types do not exist on GPUs");
                return None;
            }
        };
        let mut all = Vec::new();
        for argument in &arguments.args {
            match argument {
                // syn reads `N` as a type; a const generic or a constant of that name makes it a number.
                syn::GenericArgument::Type(syn::Type::Path(path)) if self.is_const(path) => {
                    let path = syn::Expr::Path(syn::ExprPath {
                        attrs: Vec::new(),
                        qself: None,
                        path: path.path.clone(),
                    });
                    all.push(Generic::Const(self.constant(&path, None)));
                }
                syn::GenericArgument::Type(ty) => all.push(Generic::Type(self.read(ty)?)),
                syn::GenericArgument::Const(value) => {
                    all.push(Generic::Const(self.constant(value, None)));
                }
                other => {
                    self.errors
                        .refuse(other, "lifetimes and associated types are not part of the kernel language");
                    return None;
                }
            }
        }
        Some(all)
    }

    /// Returns true if a path in the place of a type is a number: const generics are known, and constants are
    /// written in capitals.
    fn is_const(&self, path: &syn::TypePath) -> bool {
        let Some(last) = path.path.segments.last() else { return false };
        let name = last.ident.to_string();
        let parameter = self.generics.iter().find(|parameter| parameter.name() == name);
        match parameter {
            Some(parameter) => matches!(parameter, Parameter::Const { .. }),
            None => {
                last.arguments.is_none()
                    && name.len() > 1
                    && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
            }
        }
    }
}

/// The generic parameters of an item.
pub(crate) fn generics(
    generics: &syn::Generics,
    errors: &mut Errors,
    depends: &mut Depends,
) -> Vec<Parameter> {
    let mut all = Vec::new();
    if let Some(clause) = &generics.where_clause {
        errors.refuse(clause, "bounds stand in the list of parameters: write `<T: Element>`");
    }
    for parameter in &generics.params {
        let name = match parameter {
            syn::GenericParam::Lifetime(lifetime) => {
                errors.refuse(lifetime, "lifetimes are not part of the kernel language: leave them out");
                continue;
            }
            syn::GenericParam::Type(ty) => &ty.ident,
            syn::GenericParam::Const(number) => &number.ident,
        };
        let spelled = name.to_string();
        if let Some(reason) = names::refused(&spelled) {
            errors.refuse(name, reason);
        } else if names::global(&spelled) != spelled || is_own(&spelled) {
            errors.refuse(name, "the name is a word of C++ or of the kernel language: choose another");
        }
        match parameter {
            syn::GenericParam::Type(ty) => {
                if let Some(default) = &ty.default {
                    errors.refuse(default, "defaults of parameters are not part of the kernel language");
                }
                let bounds: Vec<_> = ty.bounds.iter().map(|written| bound(written, depends)).collect();
                match bounds[..] {
                    [Some(bound)] => all.push(Parameter::Type { name: spelled, bound }),
                    _ => errors.refuse(
                        ty,
                        format_args!(
                            "a type parameter has one bound, `Element`, `Number` or `Scalar`: write `{spelled}: Element`"
                        ),
                    ),
                }
            }
            syn::GenericParam::Const(number) => {
                let scalar = match &number.ty {
                    syn::Type::Path(path) => path.path.get_ident().and_then(|name| {
                        let scalar = Scalar::of(&name.to_string())?;
                        depends.own_scalar(&path.path, scalar);
                        Some(scalar)
                    }),
                    _ => None,
                };
                match scalar {
                    Some(ty @ (Scalar::Usize | Scalar::U32 | Scalar::I32 | Scalar::Bool)) => {
                        all.push(Parameter::Const { name: spelled, ty });
                    }
                    _ => errors.refuse(&number.ty, "const parameters are usize, u32, i32 or bool"),
                }
                if let Some(default) = &number.default {
                    errors.refuse(default, "defaults of parameters are not part of the kernel language");
                }
            }
            syn::GenericParam::Lifetime(_) => {}
        }
    }
    all
}

/// Returns true if the printers give a name a meaning: of a type or of a function.
fn is_own(name: &str) -> bool {
    Scalar::of(name).is_some()
        || matches!(name, "Buffer" | "Shared" | "Fragment" | "shared")
        || intrinsics::function(name).is_some()
}

fn bound(bound: &syn::TypeParamBound, depends: &mut Depends) -> Option<Bound> {
    let syn::TypeParamBound::Trait(bound) = bound else { return None };
    let found = match bound.path.segments.last()?.ident.to_string().as_str() {
        "Scalar" => Bound::Scalar,
        "Number" => Bound::Number,
        "Element" => Bound::Element,
        _ => return None,
    };
    depends.own_bound(&bound.path, found);
    Some(found)
}
