//! Effects: Rust evaluates the operands of an expression from left to right, C++ in any order.

use super::Lower;
use crate::ir::Passed;
use crate::syntax::strip;

/// The place of an expression, which decides if it may have effects.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stands {
    /// Nothing else is evaluated beside it.
    Alone,
    /// C++ may evaluate it before or after its neighbours.
    Beside,
}

impl Lower<'_> {
    /// Refuses a call with effects beside other operands.
    pub(super) fn effect(&mut self, call: &impl quote::ToTokens, stands: Stands) {
        if stands == Stands::Beside {
            self.errors.refuse(
                call,
                "the call writes to an argument, and C++ may evaluate it before or after the rest of the expression: bind its result first, `let x = ..`",
            );
        }
    }

    /// How the variable that an expression names was passed.
    pub(super) fn passed(&self, expr: &syn::Expr) -> Option<&Passed> {
        match strip(expr) {
            syn::Expr::Path(path) => {
                self.scopes.find(&path.path.get_ident()?.to_string()).map(|meaning| &meaning.passed)
            }
            _ => None,
        }
    }

    /// Returns true if no call can change the value of an operand, which may then stand beside a call that
    /// writes.
    pub(super) fn is_still(&self, expr: &syn::Expr) -> bool {
        match strip(expr) {
            syn::Expr::Lit(_) => true,
            syn::Expr::Path(path) => {
                match path.path.get_ident().and_then(|name| self.scopes.find(&name.to_string())) {
                    Some(meaning) => !meaning.mutable,
                    None => true,
                }
            }
            syn::Expr::Unary(unary) => !matches!(unary.op, syn::UnOp::Deref(_)) && self.is_still(&unary.expr),
            syn::Expr::Cast(cast) => self.is_still(&cast.expr),
            syn::Expr::Field(field) => self.is_still(&field.base),
            syn::Expr::Binary(binary) => self.is_still(&binary.left) && self.is_still(&binary.right),
            _ => false,
        }
    }
}
