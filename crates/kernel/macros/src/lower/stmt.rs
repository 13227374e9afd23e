//! Blocks, statements and `if`.

use super::effects::Stands;
use super::{Lower, Sink};
use crate::ir::{Expr, Kind, Scalar, Stmt, Type};
use crate::syntax::{compound, strip};

impl Lower<'_> {
    pub(super) fn block(&mut self, block: &syn::Block, sink: &Sink, out: &mut Vec<Stmt>) {
        self.scopes.enter();
        self.depth += 1;
        let last = block.stmts.len().checked_sub(1);
        for (n, stmt) in block.stmts.iter().enumerate() {
            self.stmt(stmt, if Some(n) == last { sink } else { &Sink::Nothing }, out);
        }
        self.depth -= 1;
        self.scopes.leave();
    }

    pub(super) fn inner_block(&mut self, block: &syn::Block, sink: &Sink) -> Vec<Stmt> {
        let mut body = Vec::new();
        self.block(block, sink, &mut body);
        body
    }

    fn stmt(&mut self, stmt: &syn::Stmt, sink: &Sink, out: &mut Vec<Stmt>) {
        match stmt {
            syn::Stmt::Local(local) => self.local(local, out),
            syn::Stmt::Expr(expr, None) => self.deliver(expr, sink, out),
            syn::Stmt::Expr(expr, Some(_)) => self.deliver(expr, &Sink::Nothing, out),
            syn::Stmt::Item(item) => {
                self.errors
                    .refuse(item, "items inside a function are not printed: move it out of the function");
            }
            syn::Stmt::Macro(stmt) => self.refuse_macro(&stmt.mac),
        }
    }

    pub(super) fn refuse_macro(&mut self, mac: &syn::Macro) {
        let name = mac.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        let reason = match name.as_str() {
            "assert" | "assert_eq" | "assert_ne" | "debug_assert" | "debug_assert_eq" | "debug_assert_ne" => {
                "GPUs cannot panic: put the condition under `requires`, or write `const { assert!(..) }`"
            }
            "panic" | "unreachable" | "todo" | "unimplemented" => {
                "GPUs cannot panic: put the condition under `requires`"
            }
            "println" | "print" | "eprintln" | "dbg" => "GPUs do not print: write to a buffer",
            "vec" => "GPUs have no heap: use an array `[x; N]`, or `shared(N)`",
            _ => {
                "macros are not expanded in the kernel language: write the code that this one stands for, or call a #[device] function"
            }
        };
        self.errors.refuse(mac, reason);
    }

    /// Lowers an expression into statements that put its value where it goes.
    pub(super) fn deliver(&mut self, expr: &syn::Expr, sink: &Sink, out: &mut Vec<Stmt>) {
        match expr {
            syn::Expr::Paren(inner) => return self.deliver(&inner.expr, sink, out),
            syn::Expr::Group(inner) => return self.deliver(&inner.expr, sink, out),
            syn::Expr::If(conditional) => return self.conditional(conditional, sink, out),
            syn::Expr::Block(block) => {
                self.no_label(block.label.as_ref());
                let body = self.inner_block(&block.block, sink);
                out.push(Stmt::Block(body));
                return;
            }
            syn::Expr::Struct(literal) if !matches!(sink, Sink::Nothing) => {
                return self.struct_literal(literal, sink, out);
            }
            _ => {}
        }
        if self.statement(expr, out) {
            return;
        }
        match sink {
            Sink::Nothing => {
                let value = self.expr(expr, None, Stands::Alone);
                match value.kind {
                    Kind::Call(_) => out.push(Stmt::Call(value)),
                    Kind::Invalid => {}
                    _ => self
                        .errors
                        .refuse(expr, "the expression has no effect: assign its value, or leave it out"),
                }
            }
            Sink::Return => {
                let value = self.expr(expr, self.result, Stands::Alone);
                out.push(Stmt::Return(Some(value)));
            }
            Sink::Assign(place) => {
                let value = self.expr(expr, place.ty.as_ref(), Stands::Alone);
                out.push(Stmt::Assign { place: place.clone(), op: None, value });
            }
        }
    }

    /// Lowers an expression that is always a statement; returns `false` for one with a value.
    fn statement(&mut self, expr: &syn::Expr, out: &mut Vec<Stmt>) -> bool {
        match expr {
            syn::Expr::While(looped) => {
                self.no_label(looped.label.as_ref());
                let (condition, body) = self.looped(&looped.attrs, |this| {
                    (this.condition(&looped.cond), this.inner_block(&looped.body, &Sink::Nothing))
                });
                out.push(Stmt::While { condition, body });
            }
            syn::Expr::Loop(looped) => {
                self.no_label(looped.label.as_ref());
                let body = self.looped(&looped.attrs, |this| this.inner_block(&looped.body, &Sink::Nothing));
                out.push(Stmt::Loop { body });
            }
            syn::Expr::ForLoop(looped) => self.for_loop(looped, out),
            syn::Expr::Break(exit) => {
                self.no_lifetime(exit.label.as_ref());
                if let Some(value) = &exit.expr {
                    self.errors
                        .refuse(value, "loops have no value in C++: assign to a variable before the `break`");
                }
                out.push(Stmt::Break);
            }
            syn::Expr::Continue(again) => {
                self.no_lifetime(again.label.as_ref());
                out.push(Stmt::Continue);
            }
            syn::Expr::Return(exit) => match &exit.expr {
                Some(value) => self.deliver(value, &Sink::Return, out),
                None => out.push(Stmt::Return(None)),
            },
            syn::Expr::Assign(assign) => self.assign(&assign.left, None, &assign.right, out),
            syn::Expr::Binary(binary) => match compound(&binary.op) {
                Some(op) => self.assign(&binary.left, Some((op, binary)), &binary.right, out),
                None => return false,
            },
            syn::Expr::Const(block) => self.const_block(block, out),
            _ => return false,
        }
        true
    }

    pub(super) fn no_label(&mut self, label: Option<&syn::Label>) {
        if let Some(label) = label {
            self.errors.refuse(label, "C++ has no labels for loops: set a flag and `break`, or move the loops to a #[device] function and `return`");
        }
    }

    fn no_lifetime(&mut self, label: Option<&syn::Lifetime>) {
        if let Some(label) = label {
            self.errors.refuse(
                label,
                "C++ has no labels for loops: set a flag, or `return` from a #[device] function",
            );
        }
    }

    pub(super) fn condition(&mut self, condition: &syn::Expr) -> Expr {
        if let syn::Expr::Let(pattern) = condition {
            return self.refuse(pattern, "patterns are not part of the kernel language: compare with `==`");
        }
        self.expr(condition, Some(&Type::BOOL), Stands::Alone)
    }

    fn conditional(&mut self, conditional: &syn::ExprIf, sink: &Sink, out: &mut Vec<Stmt>) {
        let condition = self.condition(&conditional.cond);
        let then = self.inner_block(&conditional.then_branch, sink);
        let mut otherwise = Vec::new();
        match &conditional.else_branch {
            Some((_, branch)) => match &**branch {
                syn::Expr::If(nested) => self.conditional(nested, sink, &mut otherwise),
                syn::Expr::Block(block) => otherwise = self.inner_block(&block.block, sink),
                other => self.errors.refuse(other, "write a block"),
            },
            None if !matches!(sink, Sink::Nothing) => {
                self.errors.refuse(conditional, "an `if` with a value needs an `else`");
            }
            None => {}
        }
        out.push(Stmt::If { condition, then, otherwise });
    }

    fn const_block(&mut self, block: &syn::ExprConst, out: &mut Vec<Stmt>) {
        for stmt in &block.block.stmts {
            let mac = match stmt {
                syn::Stmt::Macro(stmt) => Some(&stmt.mac),
                syn::Stmt::Expr(syn::Expr::Macro(expr), _) => Some(&expr.mac),
                _ => None,
            };
            let Some(mac) = mac.filter(|mac| mac.path.is_ident("assert")) else {
                self.errors.refuse(stmt, "a `const` block holds only `assert!(condition, \"message\")`");
                continue;
            };
            let parser = syn::punctuated::Punctuated::<syn::Expr, syn::Token![,]>::parse_terminated;
            let Some(arguments) = self.errors.keep(mac.parse_body_with(parser)) else { continue };
            let message = match arguments.iter().nth(1) {
                Some(syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. })) => text.value(),
                Some(other) => {
                    self.errors.refuse(other, "the message is one string");
                    continue;
                }
                None => "a condition of the kernel".to_string(),
            };
            if arguments.len() > 2 || message.contains(['{', '}']) {
                self.errors.refuse(mac, "the message is one string without values");
                continue;
            }
            if let Some(condition) = arguments.first() {
                let condition = self.constant(condition, Some(Scalar::Bool));
                out.push(Stmt::Assert { condition, message });
            }
        }
    }
}

/// Returns true if C++ needs statements for the value of an expression.
pub(super) fn needs_statements(expr: &syn::Expr) -> bool {
    match strip(expr) {
        syn::Expr::Struct(_) => true,
        syn::Expr::Block(block) => block_needs_statements(&block.block),
        syn::Expr::If(conditional) => {
            block_needs_statements(&conditional.then_branch)
                || conditional.else_branch.as_ref().is_some_and(|(_, branch)| needs_statements(branch))
        }
        _ => false,
    }
}

fn block_needs_statements(block: &syn::Block) -> bool {
    match &block.stmts[..] {
        [syn::Stmt::Expr(value, None)] => {
            needs_statements(value)
                || matches!(value, syn::Expr::Return(_) | syn::Expr::Break(_) | syn::Expr::Continue(_))
        }
        _ => true,
    }
}
