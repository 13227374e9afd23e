//! Names: variables, generic parameters, constants of the user and of scalar types.

use super::Lower;
use crate::intrinsics;
use crate::ir::{Expr, Kind, NameOf, Parameter, Passed, Scalar, Type};
use crate::names;

impl Lower<'_> {
    pub(super) fn path(&mut self, path: &syn::ExprPath) -> Expr {
        if path.qself.is_some() {
            return self
                .refuse(path, "associated constants are not part of the kernel language: use a #[constant]");
        }
        if let Some(ident) = path.path.get_ident()
            && let Some(value) = self.local_name(path, &ident.to_string())
        {
            return value;
        }
        let segments = &path.path.segments;
        let Some(last) = segments.last() else { return Expr::invalid() };
        let name = last.ident.to_string();
        if let Some(ty) = self.scalar_path(&path.path) {
            return self.limit(path, ty, name);
        }
        if segments.iter().any(|segment| !segment.arguments.is_none()) {
            return self.refuse(
                path,
                "generic constants are not part of the kernel language: write a #[device] function",
            );
        }
        if segments.len() > 1 && looks_like_type(&segments[segments.len() - 2].ident.to_string()) {
            return self
                .refuse(path, "associated constants are not part of the kernel language: use a #[constant]");
        }
        if of_std(&path.path) {
            return self.refuse(
                path,
                "items of the standard library do not exist on GPUs: give a #[constant] of yours the number",
            );
        }
        self.depends.item(&path.path);
        Expr::new(Kind::Name { name: names::global(&name), of: NameOf::Const }, None)
    }

    /// A variable or a generic parameter, if the name is one.
    fn local_name(&mut self, path: &syn::ExprPath, name: &str) -> Option<Expr> {
        if let Some(meaning) = self.scopes.find(name) {
            let of = match meaning.passed {
                Passed::Params => NameOf::Params,
                _ if meaning.mutable => NameOf::Mutable,
                _ => NameOf::Fixed,
            };
            return Some(Expr::new(Kind::Name { name: meaning.cpp.clone(), of }, meaning.ty.clone()));
        }
        match self.generics.iter().find(|parameter| parameter.name() == name)? {
            Parameter::Const { ty, .. } => {
                let kind = Kind::Name { name: name.to_string(), of: NameOf::Const };
                Some(Expr::new(kind, Some(Type::Scalar(*ty))))
            }
            Parameter::Type { .. } => Some(self.refuse(path, "this is a type, not a value")),
        }
    }

    /// A constant of a scalar type: `f32::INFINITY`, `T::MAX`.
    fn limit(&mut self, path: &syn::ExprPath, ty: Type, name: String) -> Expr {
        match intrinsics::limit(&name) {
            Some(result) => {
                let of = result.map(Type::Scalar).or_else(|| Some(ty.clone()));
                Expr::new(Kind::Limit(ty, name), of)
            }
            None => self.refuse(
                path,
                "the kernel language has MAX, MIN, BITS of integers and MAX, MIN, INFINITY, NEG_INFINITY, NAN, MIN_POSITIVE, EPSILON of f32: write the number",
            ),
        }
    }

    /// The type before the last segment, where it is a scalar or a type parameter.
    pub(super) fn scalar_path(&mut self, path: &syn::Path) -> Option<Type> {
        let mut segments = path.segments.iter().rev().skip(1);
        let owner = segments.next().filter(|segment| segment.arguments.is_none())?.ident.to_string();
        if segments.next().is_some_and(|outer| outer.ident != "half") {
            return None;
        }
        if let Some(scalar) = Scalar::of(&owner) {
            self.depends.own_owner(&without_last(path), scalar);
            return Some(Type::Scalar(scalar));
        }
        self.generics.iter().find_map(|parameter| match parameter {
            Parameter::Type { name, .. } if *name == owner => Some(Type::Parameter(owner.clone())),
            _ => None,
        })
    }
}

/// The path of the type or the module that a path leads through last.
pub(super) fn without_last(path: &syn::Path) -> syn::Path {
    let mut path = path.clone();
    path.segments.pop();
    path.segments.pop_punct();
    path
}

/// Returns true if a path begins in the standard library.
pub(super) fn of_std(path: &syn::Path) -> bool {
    let first = path.segments.first().map(|segment| segment.ident.to_string());
    path.segments.len() > 1 && matches!(first.as_deref(), Some("std" | "core" | "alloc"))
}

/// Rust's names of types start with a capital and have small letters.
pub(super) fn looks_like_type(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase()) && name.contains(|c: char| c.is_ascii_lowercase())
}
