//! Assignments, and struct literals, which C++ fills field by field.

use super::effects::Stands;
use super::stmt::needs_statements;
use super::{Lower, Sink};
use crate::ir::{Binary, Expr, Kind, NameOf, Stmt, Type};
use crate::names;
use crate::syntax::strip;

impl Lower<'_> {
    pub(super) fn assign(
        &mut self,
        left: &syn::Expr,
        op: Option<(Binary, &syn::ExprBinary)>,
        right: &syn::Expr,
        out: &mut Vec<Stmt>,
    ) {
        if let syn::Expr::Infer(_) = left {
            let value = self.expr(right, None, Stands::Alone);
            out.push(Stmt::Discard(value));
            return;
        }
        let Some(place) = self.place(left) else {
            self.expr(right, None, Stands::Alone);
            return;
        };
        match op {
            None => {
                if needs_statements(right) {
                    // The blocks may read the place, which is evaluated after them.
                    if matches!(place.kind, Kind::Name { .. })
                        && !matches!(strip(right), syn::Expr::Struct(_))
                    {
                        self.deliver(right, &Sink::Assign(place), out);
                    } else {
                        self.errors
                            .refuse(right, "C++ needs statements for this value: bind it first, `let value: T = ..`, and assign `value`");
                    }
                    return;
                }
                let stands = match place.kind {
                    Kind::Name { .. } => Stands::Alone,
                    _ => Stands::Beside,
                };
                let value = self.expr(right, place.ty.as_ref(), stands);
                out.push(Stmt::Assign { place, op: None, value });
            }
            Some((op, whole)) => {
                let expected = if op.is_shift() { None } else { place.ty.clone() };
                let value = self.operand(right, expected.as_ref(), Stands::Beside);
                self.operands(op, &place, &value, whole);
                // C++ computes `a &= b` of two bools as an int, and the assignment converts it back.
                out.push(Stmt::Assign { place, op: Some(op), value });
            }
        }
    }

    /// A place that can be assigned to.
    fn place(&mut self, expr: &syn::Expr) -> Option<Expr> {
        match strip(expr) {
            syn::Expr::Path(_) => {
                let place = self.expr(expr, None, Stands::Beside);
                match (&place.kind, &place.ty) {
                    (Kind::Invalid, _) => None,
                    (Kind::Name { .. }, Some(Type::Buffer(_) | Type::Shared(_))) => {
                        self.errors
                            .refuse(expr, "memory cannot be replaced: assign to an element, `x[i] = ..`");
                        None
                    }
                    (Kind::Name { .. }, _) => Some(place),
                    _ => None,
                }
            }
            syn::Expr::Unary(_) | syn::Expr::Index(_) | syn::Expr::Field(_) => {
                let place = self.expr(expr, None, Stands::Beside);
                let mut base = &place;
                loop {
                    match &base.kind {
                        Kind::Index(inner, _) | Kind::Field(inner, _) => base = inner,
                        Kind::Name { .. } => return Some(place),
                        Kind::Invalid => return None,
                        _ => break,
                    }
                }
                self.errors.refuse(
                    expr,
                    "nothing can be assigned to this expression: assign to a variable, an element or a field",
                );
                None
            }
            syn::Expr::Tuple(_) => {
                self.errors
                    .refuse(expr, "tuples are not part of the kernel language: assign each value by itself");
                None
            }
            other => {
                self.errors.refuse(
                    other,
                    "nothing can be assigned to this expression: assign to a variable, an element or a field",
                );
                None
            }
        }
    }

    /// The type of a struct literal, from its path.
    pub(super) fn struct_type(&mut self, literal: &syn::ExprStruct) -> Option<Type> {
        let mut path = literal.path.clone();
        for segment in &mut path.segments {
            if let syn::PathArguments::AngleBracketed(arguments) = &mut segment.arguments {
                arguments.colon2_token = None;
            }
        }
        self.reader().read(&syn::Type::Path(syn::TypePath { qself: None, path }))
    }

    pub(super) fn struct_literal(&mut self, literal: &syn::ExprStruct, sink: &Sink, out: &mut Vec<Stmt>) {
        if let Some(rest) = &literal.rest {
            self.errors
                .refuse(rest, "a struct literal names every field: C++ would leave the others as they are");
        }
        let expected = match sink {
            Sink::Assign(place) => place.ty.clone(),
            _ => self.result.cloned(),
        };
        let name = literal.path.segments.last().map(|segment| names::global(&segment.ident.to_string()));
        let ty = match expected {
            Some(Type::Struct(expected, arguments)) if Some(&expected) == name.as_ref() => {
                Some(Type::Struct(expected, arguments))
            }
            _ => self.struct_type(literal),
        };
        let Some(ty) = ty else { return };
        let (place, returned) = match sink {
            Sink::Assign(place) => (place.clone(), false),
            _ => {
                let result = self.scopes.fresh("result");
                out.push(Stmt::Let {
                    name: result.clone(),
                    ty: Some(ty.clone()),
                    mutable: true,
                    value: None,
                });
                let kind = Kind::Name { name: result, of: NameOf::Mutable };
                (Expr::new(kind, Some(ty)), true)
            }
        };
        for field in &literal.fields {
            let syn::Member::Named(member) = &field.member else {
                self.errors.refuse(&field.member, "structs of the kernel language have named fields");
                continue;
            };
            let kind = Kind::Field(Box::new(place.clone()), names::field(&member.to_string()));
            let place = Expr::new(kind, None);
            if field.colon_token.is_none() {
                let value = self.expr(&field.expr, None, Stands::Alone);
                out.push(Stmt::Assign { place, op: None, value });
            } else if let (syn::Expr::Struct(nested), None) = (strip(&field.expr), &place.ty) {
                let ty = self.struct_type(nested);
                self.struct_literal(nested, &Sink::Assign(Expr { ty, ..place }), out);
            } else {
                self.deliver(&field.expr, &Sink::Assign(place), out);
            }
        }
        if returned {
            out.push(Stmt::Return(Some(place)));
        }
    }
}
