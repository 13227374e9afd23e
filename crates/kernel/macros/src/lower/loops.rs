//! Loops.

use super::effects::Stands;
use super::literal::adopt;
use super::{Lower, Meaning, Sink};
use crate::ir::{Expr, For, Kind, NameOf, Passed, Stmt, Type, Walk};
use crate::node::NodeId;
use crate::syntax::is_unroll;

/// The range of a `for` loop.
struct Range<'e> {
    /// The expression of the loop.
    whole: &'e syn::Expr,
    start: &'e syn::Expr,
    end: &'e syn::Expr,
    inclusive: bool,
    reverse: bool,
    step: Option<&'e syn::Expr>,
}

impl Lower<'_> {
    /// Lowers the repeated part of a loop, and records its convergent operations.
    pub(super) fn looped<R>(
        &mut self,
        attributes: &[syn::Attribute],
        lower: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let before = std::mem::take(&mut self.convergence);
        let lowered = lower(self);
        let inside = std::mem::replace(&mut self.convergence, before);
        self.convergence.add(&inside);
        if let Some(id) = NodeId::of(attributes) {
            self.annotations.loops.insert(id, inside);
        }
        lowered
    }

    pub(super) fn for_loop(&mut self, looped: &syn::ExprForLoop, out: &mut Vec<Stmt>) {
        self.no_label(looped.label.as_ref());
        let unroll = looped.attrs.iter().any(is_unroll);
        let Some(range) = self.range(&looped.expr) else {
            self.skip_loop(looped);
            return;
        };
        let (mut start, end, ty) = self.ends(&range, &looped.expr);
        let walk = self.walk(&range, ty.as_ref(), &mut start, out);
        self.scopes.enter();
        let named = !matches!(&*looped.pat, syn::Pat::Wild(_));
        let name = self.loop_variable(&looped.pat);
        let variable = self.scopes.fresh(&name);
        if named {
            let (cpp, ty) = (variable.clone(), ty.clone());
            self.scopes.bind(&name, Meaning { cpp, ty, mutable: false, passed: Passed::Value });
        }
        let (bound, extra) = match walk {
            Walk::Reverse => ("start", ""),
            Walk::Step(_) => ("end", "left"),
            Walk::SignedStep(_) => ("at", "left"),
            Walk::Inclusive => ("end", "more"),
            Walk::Forward => ("end", ""),
        };
        let bound = self.scopes.fresh(&format!("{name}_{bound}"));
        let extra = self.scopes.fresh(&format!("{name}_{extra}"));
        let body = self.looped(&looped.attrs, |this| this.inner_block(&looped.body, &Sink::Nothing));
        self.scopes.leave();
        let looped = For { variable, bound, extra, ty, start, end, walk, named, unroll, body };
        out.push(Stmt::For(Box::new(looped)));
    }

    /// The ends of a range, in the type that one of them has.
    fn ends(&mut self, range: &Range<'_>, whole: &syn::Expr) -> (Expr, Expr, Option<Type>) {
        let mut start = self.expr(range.start, None, Stands::Beside);
        let mut end = self.expr(range.end, None, Stands::Beside);
        let ty = start.ty.clone().or_else(|| end.ty.clone());
        if ty.is_none() && start.is_untyped() && end.is_untyped() {
            self.errors
                .refuse(whole, "the range has no type, and C++ would take `int`: add a suffix, `0u32..4`");
        }
        if let Some(ty) = &ty {
            adopt(&mut start, ty);
            adopt(&mut end, ty);
        }
        (start, end, ty)
    }

    /// The Rust name of a loop's variable.
    fn loop_variable(&mut self, pattern: &syn::Pat) -> String {
        match pattern {
            syn::Pat::Ident(ident) if ident.mutability.is_some() => {
                self.errors.refuse(
                    pattern,
                    "assigning to the variable of a C++ loop changes the loop: copy it to another variable",
                );
                ident.ident.to_string()
            }
            syn::Pat::Wild(_) => "unused".to_string(),
            pattern => self.pattern(pattern).map(|(name, _)| name.to_string()).unwrap_or_default(),
        }
    }

    /// How a range is walked, from `first` on.
    fn walk(&mut self, range: &Range<'_>, ty: Option<&Type>, first: &mut Expr, out: &mut Vec<Stmt>) -> Walk {
        match (range.reverse, range.inclusive, range.step) {
            (false, false, None) => Walk::Forward,
            (false, true, None) => Walk::Inclusive,
            (true, false, None) => Walk::Reverse,
            (false, false, Some(step)) => {
                let step = self.expr(step, Some(&Type::USIZE), Stands::Beside);
                let is_unsigned = matches!(ty, Some(Type::Scalar(of)) if of.unsigned() == *of);
                if !is_unsigned {
                    *first = self.fixed(first.clone(), "start", out);
                }
                let step = self.fixed(step, "step", out);
                if is_unsigned { Walk::Step(step) } else { Walk::SignedStep(step) }
            }
            _ => {
                self.errors.refuse(
                    range.whole,
                    "the kernel language walks `a..b`, `a..=b`, `(a..b).step_by(c)` and `(a..b).rev()`: write one of them",
                );
                Walk::Forward
            }
        }
    }

    /// A part of a range that is printed twice: a value that may change is kept in a variable.
    fn fixed(&mut self, value: Expr, name: &str, out: &mut Vec<Stmt>) -> Expr {
        if value.is_fixed() {
            return value;
        }
        let (name, ty) = (self.scopes.fresh(name), value.ty.clone());
        out.push(Stmt::Let { name: name.clone(), ty: None, mutable: false, value: Some(value) });
        Expr::new(Kind::Name { name, of: NameOf::Fixed }, ty)
    }

    /// Checks the body of a refused loop, for its other errors.
    fn skip_loop(&mut self, looped: &syn::ExprForLoop) {
        self.scopes.enter();
        if let Some((name, _)) = match &*looped.pat {
            syn::Pat::Wild(_) => None,
            pattern => self.pattern(pattern),
        } {
            self.declare(&name.to_string(), None, false);
        }
        self.inner_block(&looped.body, &Sink::Nothing);
        self.scopes.leave();
    }

    fn range<'e>(&mut self, expr: &'e syn::Expr) -> Option<Range<'e>> {
        match expr {
            syn::Expr::Paren(inner) => self.range(&inner.expr),
            syn::Expr::Group(inner) => self.range(&inner.expr),
            syn::Expr::Range(range) => {
                let (Some(start), Some(end)) = (&range.start, &range.end) else {
                    self.errors.refuse(
                        range,
                        "a range has both ends, `a..b`: for a loop without an end write `loop`",
                    );
                    return None;
                };
                let inclusive = matches!(range.limits, syn::RangeLimits::Closed(_));
                Some(Range { whole: expr, start, end, inclusive, reverse: false, step: None })
            }
            syn::Expr::MethodCall(call) => {
                let name = call.method.to_string();
                match (name.as_str(), call.args.len()) {
                    ("rev", 0) => {
                        let range = self.range(&call.receiver)?;
                        // The order of `rev` and `step_by` matters: only a plain range is reversed.
                        let twice = range.reverse || range.step.is_some();
                        if twice {
                            self.errors.refuse(call, "`rev` is for a plain range: write `(a..b).rev()`");
                            return None;
                        }
                        Some(Range { whole: expr, reverse: true, ..range })
                    }
                    ("step_by", 1) => {
                        let range = self.range(&call.receiver)?;
                        if range.step.is_some() {
                            self.errors.refuse(call, "a range has one step: write one `step_by`");
                            return None;
                        }
                        Some(Range { whole: expr, step: call.args.first(), ..range })
                    }
                    _ => {
                        self.errors.refuse(
                            expr,
                            "`for` loops walk a range: write `for i in a..b`, and index with `i`",
                        );
                        None
                    }
                }
            }
            _ => {
                self.errors
                    .refuse(expr, "`for` loops walk a range: write `for i in a..b`, and index with `i`");
                None
            }
        }
    }
}
