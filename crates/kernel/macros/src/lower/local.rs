//! `let`: variables and threadgroup arrays.

use super::effects::Stands;
use super::stmt::needs_statements;
use super::{Lower, Meaning, SharedArray, Sink};
use crate::ir::{Expr, Generic, Kind, NameOf, Passed, Scalar, Stmt, Type};
use crate::names;
use crate::syntax::{shared_call, strip};

/// The variable of a `let`.
struct Variable<'p> {
    name: &'p syn::Ident,
    mutable: bool,
    /// The type as written.
    ty: Option<Type>,
}

impl Lower<'_> {
    pub(super) fn local(&mut self, local: &syn::Local, out: &mut Vec<Stmt>) {
        let (pattern, written) = match &local.pat {
            syn::Pat::Type(typed) => (&*typed.pat, Some(&*typed.ty)),
            other => (other, None),
        };
        let Some(init) = &local.init else {
            self.errors.refuse(
                local,
                "a variable gets its value where it is declared: C++ does not check that it gets one later",
            );
            return;
        };
        if let Some((_, diverge)) = &init.diverge {
            self.errors.refuse(diverge, "`let .. else` is not part of the kernel language: write an `if`");
            return;
        }
        if let syn::Pat::Wild(_) = pattern {
            return self.discard(local, &init.expr, out);
        }
        let Some((name, mutable)) = self.pattern(pattern) else { return };
        if let Some(call) = shared_call(&init.expr) {
            if let syn::Expr::Path(function) = &*call.func
                && let Some(name) = function.path.get_ident()
            {
                self.depends.own_name(name);
            }
            return self.shared_array(name, written, call, out);
        }
        let ty = match written.map(|ty| self.reader().read(ty)) {
            Some(None) => {
                // The variable is known, to leave no second error where it is used.
                self.expr(&init.expr, None, Stands::Alone);
                self.declare(&name.to_string(), None, mutable);
                return;
            }
            written => written.flatten(),
        };
        let variable = Variable { name, mutable, ty };
        if needs_statements(&init.expr) {
            self.local_by_statements(variable, &init.expr, out);
        } else {
            self.local_by_value(variable, &init.expr, out);
        }
    }

    /// `let _ = call`.
    fn discard(&mut self, local: &syn::Local, value: &syn::Expr, out: &mut Vec<Stmt>) {
        let value = self.expr(value, None, Stands::Alone);
        if matches!(value.kind, Kind::Call(_)) {
            out.push(Stmt::Discard(value));
        } else if value.kind != Kind::Invalid {
            self.errors
                .refuse(local, "`let _` has no effect here: only the result of a call can be left unused");
        }
    }

    /// A variable whose value takes statements: they assign it after it is declared.
    fn local_by_statements(&mut self, variable: Variable<'_>, value: &syn::Expr, out: &mut Vec<Stmt>) {
        let Variable { name, mutable, ty } = variable;
        let rust = name.to_string();
        let literal = match strip(value) {
            syn::Expr::Struct(literal) if ty.is_none() => self.struct_type(literal),
            _ => None,
        };
        let Some(ty) = ty.or(literal) else {
            if !matches!(strip(value), syn::Expr::Struct(_)) {
                self.errors.refuse(
                    name,
                    format_args!("C++ declares the variable before the blocks that give its value: write `let {rust}: T = ..`"),
                );
            }
            self.declare(&rust, None, mutable);
            return;
        };
        // The value is evaluated before the name is declared, and does not see it.
        let hidden = self.scopes.fresh(&rust);
        let kind = Kind::Name { name: hidden.clone(), of: NameOf::Mutable };
        let place = Expr::new(kind, Some(ty.clone()));
        out.push(Stmt::Let { name: hidden.clone(), ty: Some(ty.clone()), mutable: true, value: None });
        self.deliver(value, &Sink::Assign(place), out);
        self.scopes.bind(&rust, Meaning { cpp: hidden, ty: Some(ty), mutable, passed: Passed::Value });
    }

    fn local_by_value(&mut self, variable: Variable<'_>, init: &syn::Expr, out: &mut Vec<Stmt>) {
        let Variable { name, mutable, ty } = variable;
        let value = self.expr(init, ty.as_ref(), Stands::Alone);
        if ty.is_none() && value.is_untyped() {
            self.errors.refuse(
                init,
                "the literal has no type here, and C++ would take `int`: add a suffix, `0u32`, or write the type",
            );
        }
        if matches!(value.ty, Some(Type::Buffer(_) | Type::Shared(_))) {
            self.errors.refuse(
                init,
                "memory cannot get a second name: use the first, or pass it to a #[device] function",
            );
        }
        let known = ty.clone().or_else(|| value.ty.clone());
        let name = self.declare(&name.to_string(), known, mutable);
        out.push(Stmt::Let { name, ty, mutable, value: Some(value) });
    }

    pub(super) fn declare(&mut self, rust: &str, ty: Option<Type>, mutable: bool) -> String {
        let cpp = self.scopes.fresh(rust);
        self.scopes.bind(rust, Meaning { cpp: cpp.clone(), ty, mutable, passed: Passed::Value });
        cpp
    }

    /// The name that a pattern binds.
    pub(super) fn pattern<'p>(&mut self, pattern: &'p syn::Pat) -> Option<(&'p syn::Ident, bool)> {
        let reason = match pattern {
            syn::Pat::Ident(ident) => {
                if ident.by_ref.is_some() {
                    "`ref` is not part of the kernel language: copy the value"
                } else if ident.subpat.is_some() {
                    "patterns are not part of the kernel language: bind a name, and test it with `if`"
                } else if let Some(reason) = names::refused(&ident.ident.to_string()) {
                    reason
                } else {
                    return Some((&ident.ident, ident.mutability.is_some()));
                }
            }
            syn::Pat::Tuple(_) => {
                "tuples are not part of the kernel language: bind each value by its own `let`"
            }
            syn::Pat::Wild(_) => "give it a name",
            _ => {
                "patterns are not part of the kernel language: bind a name, and read fields and elements from it"
            }
        };
        self.errors.refuse(pattern, reason);
        None
    }

    fn shared_array(
        &mut self,
        name: &syn::Ident,
        written: Option<&syn::Type>,
        call: &syn::ExprCall,
        out: &mut Vec<Stmt>,
    ) {
        let rust = name.to_string();
        let turbofish = match &*call.func {
            syn::Expr::Path(path) => path.path.segments.last().map(|segment| segment.arguments.clone()),
            _ => None,
        };
        let element = match written.map(|ty| self.reader().read(ty)) {
            Some(Some(Type::Shared(element))) => Some(*element),
            Some(None) => return,
            Some(Some(_)) => {
                self.errors.refuse(&written, "`shared(..)` returns a `Shared<T>`");
                return;
            }
            None => match turbofish.and_then(|arguments| self.reader().arguments(&arguments)).as_deref() {
                Some([Generic::Type(ty)]) => Some(ty.clone()),
                _ => None,
            },
        };
        let Some(element) = element else {
            self.errors.refuse(
                name,
                format_args!("the elements have no type: write `let mut {rust}: Shared<f32> = ..`"),
            );
            self.declare(&rust, None, true);
            return;
        };
        if !(self.depth == 1 && self.kernel) {
            self.errors.refuse(
                call,
                "threadgroup arrays are declared at the top level of a kernel's body, and passed on",
            );
        }
        let mut arguments = call.args.iter();
        let (Some(length), None) = (arguments.next(), arguments.next()) else {
            self.errors.refuse(call, "`shared` takes the number of elements: write `shared(N)`");
            return;
        };
        let value = self.constant(length, Some(Scalar::Usize));
        let ty = Type::Shared(Box::new(element.clone()));
        let cpp = self.scopes.fresh(&rust);
        self.scopes.bind(
            &rust,
            Meaning { cpp: cpp.clone(), ty: Some(ty), mutable: true, passed: Passed::MemoryMut },
        );
        self.shared.push(SharedArray { name: rust, element: element.clone(), length: length.clone() });
        out.push(Stmt::Shared { name: cpp, element, length: value });
    }
}
