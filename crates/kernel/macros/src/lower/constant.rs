//! Constant expressions: the lengths of arrays, generic arguments, conditions of `const` blocks.

use std::collections::HashSet;

use super::effects::Stands;
use super::{Context, Lower};
use crate::ir::{Expr, Kind, Scalar, Type};
use crate::types::Reader;

impl Reader<'_> {
    /// A constant expression of a type: the length of an array, a generic argument.
    pub(crate) fn constant(&mut self, expr: &syn::Expr, scalar: Option<Scalar>) -> Expr {
        let context = Context {
            errors: self.errors,
            depends: self.depends,
            generics: self.generics,
            name: "",
            kernel: false,
            result: None,
        };
        Lower::new(context, HashSet::new()).constant(expr, scalar)
    }
}

impl Lower<'_> {
    pub(super) fn constant(&mut self, expr: &syn::Expr, scalar: Option<Scalar>) -> Expr {
        let inner = match expr {
            syn::Expr::Block(block) => match &block.block.stmts[..] {
                [syn::Stmt::Expr(inner, None)] => inner,
                _ => expr,
            },
            _ => expr,
        };
        let mut value = self.expr(inner, scalar.map(Type::Scalar).as_ref(), Stands::Beside);
        plain_casts(&mut value);
        if !value.is_const() && value.kind != Kind::Invalid {
            self.errors.refuse(
                expr,
                "the value must be known when the kernel is compiled: write literals, const parameters, #[constant]s and arithmetic",
            );
        }
        // A length prints as its digits: C++ converts them to the type of the parameter.
        match value.kind {
            Kind::Int { value: digits, hex } if scalar == Some(Scalar::Usize) => {
                Expr::new(Kind::Int { value: digits, hex }, None)
            }
            kind => Expr::new(kind, value.ty),
        }
    }
}

/// C++ evaluates its own casts while it compiles: casts of constants of unknown type become casts of `usize`.
fn plain_casts(value: &mut Expr) {
    match &mut value.kind {
        Kind::Cast(inner, _) => {
            inner.ty.get_or_insert(Type::USIZE);
            plain_casts(inner);
        }
        Kind::Not(inner) | Kind::Neg(inner) => plain_casts(inner),
        Kind::Binary(_, left, right) => {
            plain_casts(left);
            plain_casts(right);
        }
        _ => {}
    }
}
