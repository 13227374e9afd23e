//! The check: from syn's tree to what prints. What has no meaning here is refused where it stands.

use std::collections::{BTreeMap, HashMap, HashSet};

use proc_macro2::{Span, TokenStream};
use quote::quote;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use crate::depends::Depends;
use crate::errors::Errors;
use crate::intrinsics::{self, Gives, Meets, Takes};
use crate::ir::{
    Argument, Binary, Call, Expr, For, Generic, Kind, NameOf, Parameter, Passed, Scalar, Stmt, Type, Walk,
};
use crate::names::{self, Scopes};
use crate::node::{self, NodeId};
use crate::syntax::{is_lint, module_of, shared_call, strip};
use crate::types::Reader;

/// A function after the check.
pub(crate) struct Lowered {
    pub(crate) body: Vec<Stmt>,
    /// The threadgroup arrays: names, elements and lengths as written.
    pub(crate) shared: Vec<SharedArray>,
    pub(crate) annotations: Annotations,
    /// Convergent operations of the body.
    pub(crate) convergence: Convergence,
}

/// What the native function has to know about expressions.
#[derive(Default)]
pub(crate) struct Annotations {
    /// `&`, `|` and `^` of operands that are known to be `bool`.
    pub(crate) bool_operators: HashSet<NodeId>,
    /// `if`s with a literal without a type in one branch and a value of unknown type in the other.
    pub(crate) beside_literals: HashSet<NodeId>,
    /// Method calls whose receiver is a `&mut` parameter.
    pub(crate) reference_receivers: HashSet<NodeId>,
    /// Convergent operations of each loop.
    pub(crate) loops: HashMap<NodeId, Convergence>,
    /// Calls of device functions.
    pub(crate) device_calls: HashSet<NodeId>,
}

/// Where threads meet in a part of a body: at operations of a SIMD group and barriers, its own or those of device functions.
#[derive(Clone, Default)]
pub(crate) struct Convergence {
    operation: bool,
    barrier: bool,
    /// The device functions: the modules beside them by the paths that the user wrote, by their tokens.
    functions: BTreeMap<String, syn::Path>,
}

impl Convergence {
    fn add(&mut self, other: &Convergence) {
        self.operation |= other.operation;
        self.barrier |= other.barrier;
        self.functions.extend(other.functions.clone());
    }

    /// Whether threads can meet there, as far as the tokens say.
    pub(crate) fn are_possible(&self) -> bool {
        self.operation || self.barrier || !self.functions.is_empty()
    }

    /// Whether threads meet there: a constant expression, where functions are reached by their paths through `module`.
    pub(crate) fn any(&self, module: impl Fn(&syn::Path) -> syn::Path) -> TokenStream {
        if self.operation || self.barrier {
            return quote!(true);
        }
        let functions = self.functions.values().map(module);
        quote!((false #(|| #functions::MEETS)*))
    }

    /// Whether there is a barrier; otherwise as [`any`](Self::any).
    pub(crate) fn barriers(&self, module: impl Fn(&syn::Path) -> syn::Path) -> TokenStream {
        if self.barrier {
            return quote!(true);
        }
        let functions = self.functions.values().map(module);
        quote!((false #(|| #functions::HAS_BARRIER)*))
    }
}

/// A `let mut name: Shared<element> = shared(length)`.
pub(crate) struct SharedArray {
    pub(crate) name: String,
    pub(crate) element: Type,
    pub(crate) length: syn::Expr,
}

/// What a function is checked against.
pub(crate) struct Context<'a> {
    pub(crate) errors: &'a mut Errors,
    pub(crate) depends: &'a mut Depends,
    pub(crate) generics: &'a [Parameter],
    /// The Rust name of the function.
    pub(crate) name: &'a str,
    pub(crate) kernel: bool,
    pub(crate) result: Option<&'a Type>,
}

/// Checks a body. Each argument is given with its Rust name.
pub(crate) fn body(
    context: Context<'_>,
    arguments: &mut [(String, Argument)],
    block: &mut syn::Block,
) -> Lowered {
    Attributes(context.errors).visit_block(block);
    node::number(block);
    let mut globals = Globals::default();
    globals.visit_block(block);
    globals.0.extend(context.generics.iter().map(|parameter| parameter.name().to_string()));
    let result = context.result.cloned();
    let mut lower = Lower {
        errors: context.errors,
        depends: context.depends,
        generics: context.generics,
        name: context.name,
        scopes: Scopes::new(globals.0),
        result,
        kernel: context.kernel,
        depth: 0,
        shared: Vec::new(),
        annotations: Annotations::default(),
        convergence: Convergence::default(),
    };
    for (rust, argument) in arguments.iter_mut() {
        argument.name = lower.scopes.fresh(rust);
        let meaning = Meaning {
            cpp: argument.name.clone(),
            ty: Some(argument.ty.clone()),
            mutable: argument.mutable || argument.passed == Passed::Reference,
            passed: argument.passed.clone(),
        };
        lower.scopes.bind(rust, meaning);
    }
    let mut body = Vec::new();
    let sink = if lower.result.is_some() { Sink::Return } else { Sink::Nothing };
    lower.block(block, &sink, &mut body);
    Lowered { body, shared: lower.shared, annotations: lower.annotations, convergence: lower.convergence }
}

/// Attributes of a body: all but those of lints are the language's, or would be lost.
struct Attributes<'a>(&'a mut Errors);

impl<'ast> Visit<'ast> for Attributes<'_> {
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if attribute.path().is_ident("unroll") {
            self.0.refuse(attribute, "`#[unroll]` is for `for` loops");
        } else if !is_lint(attribute) {
            self.0.refuse(
                attribute,
                "this attribute would be lost: the kernel language has `#[unroll]` on `for`",
            );
        }
    }

    fn visit_expr_for_loop(&mut self, looped: &'ast syn::ExprForLoop) {
        looped
            .attrs
            .iter()
            .filter(|attribute| !is_unroll(attribute))
            .for_each(|other| self.visit_attribute(other));
        self.visit_expr(&looped.expr);
        self.visit_block(&looped.body);
    }
}

/// Names of other items that a body mentions: no local may hide them in C++.
#[derive(Default)]
struct Globals(HashSet<String>);

impl<'ast> Visit<'ast> for Globals {
    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let syn::Expr::Path(path) = &*call.func {
            self.add(&path.path);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.add(path);
        }
        visit::visit_path(self, path);
    }

    fn visit_type_path(&mut self, path: &'ast syn::TypePath) {
        self.add(&path.path);
        visit::visit_type_path(self, path);
    }

    fn visit_expr_struct(&mut self, literal: &'ast syn::ExprStruct) {
        self.add(&literal.path);
        visit::visit_expr_struct(self, literal);
    }
}

impl Globals {
    fn add(&mut self, path: &syn::Path) {
        self.0.extend(path.segments.last().map(|segment| names::global(&segment.ident.to_string())));
    }
}

/// What a local name stands for.
#[derive(Clone, Debug)]
struct Meaning {
    cpp: String,
    ty: Option<Type>,
    mutable: bool,
    passed: Passed,
}

/// Where the value of an expression goes.
#[derive(Clone)]
enum Sink {
    /// There is none: the expression is a statement.
    Nothing,
    Return,
    Assign(Expr),
}

/// Whether an expression may have effects where it stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// Nothing else is evaluated beside it.
    Alone,
    /// C++ may evaluate it before or after its neighbours.
    Beside,
}

struct Lower<'a> {
    errors: &'a mut Errors,
    depends: &'a mut Depends,
    generics: &'a [Parameter],
    name: &'a str,
    scopes: Scopes<Meaning>,
    result: Option<Type>,
    kernel: bool,
    depth: usize,
    shared: Vec<SharedArray>,
    annotations: Annotations,
    /// Of the innermost loop, so far.
    convergence: Convergence,
}

const BOOL: Type = Type::Scalar(Scalar::Bool);
const F32: Type = Type::Scalar(Scalar::F32);
const U32: Type = Type::Scalar(Scalar::U32);
const I32: Type = Type::Scalar(Scalar::I32);
const I64: Type = Type::Scalar(Scalar::I64);
const USIZE: Type = Type::Scalar(Scalar::Usize);

/// A constant expression of a type: the length of an array, a generic argument.
pub(crate) fn constant(reader: &mut Reader<'_>, expr: &syn::Expr, scalar: Option<Scalar>) -> Expr {
    let mut lower = Lower {
        errors: reader.errors,
        depends: reader.depends,
        generics: reader.generics,
        name: "",
        scopes: Scopes::new(HashSet::new()),
        result: None,
        kernel: false,
        depth: 0,
        shared: Vec::new(),
        annotations: Annotations::default(),
        convergence: Convergence::default(),
    };
    lower.constant(expr, scalar)
}

impl Lower<'_> {
    fn reader(&mut self) -> Reader<'_> {
        Reader { errors: self.errors, depends: self.depends, generics: self.generics }
    }

    fn constant(&mut self, expr: &syn::Expr, scalar: Option<Scalar>) -> Expr {
        let inner = match expr {
            syn::Expr::Block(block) => match &block.block.stmts[..] {
                [syn::Stmt::Expr(inner, None)] => inner,
                _ => expr,
            },
            _ => expr,
        };
        let mut value = self.expr(inner, scalar.map(Type::Scalar).as_ref(), Stands::Beside);
        plain_casts(&mut value);
        if !value.is_const() && value.kind != Kind::Refused {
            self.errors.refuse(
                expr,
                "this is fixed when the kernel is compiled: write literals, const parameters, #[constant]s and arithmetic",
            );
        }
        // A length prints as its digits: C++ converts them to the type of the parameter.
        match value.kind {
            Kind::Int { value: digits, hex } if scalar == Some(Scalar::Usize) => {
                Expr::new(Kind::Int { value: digits, hex }, None, value.span)
            }
            kind => Expr::new(kind, value.ty, value.span),
        }
    }

    // Statements.

    fn block(&mut self, block: &syn::Block, sink: &Sink, out: &mut Vec<Stmt>) {
        self.scopes.enter();
        let top = self.depth == 0;
        self.depth += 1;
        let last = block.stmts.len().checked_sub(1);
        for (n, stmt) in block.stmts.iter().enumerate() {
            self.stmt(stmt, if Some(n) == last { sink } else { &Sink::Nothing }, top, out);
        }
        self.depth -= 1;
        self.scopes.leave();
    }

    fn inner_block(&mut self, block: &syn::Block, sink: &Sink) -> Vec<Stmt> {
        let mut body = Vec::new();
        self.block(block, sink, &mut body);
        body
    }

    fn stmt(&mut self, stmt: &syn::Stmt, sink: &Sink, top: bool, out: &mut Vec<Stmt>) {
        match stmt {
            syn::Stmt::Local(local) => self.local(local, top, out),
            syn::Stmt::Expr(expr, None) => self.deliver(expr, sink, out),
            syn::Stmt::Expr(expr, Some(_)) => self.deliver(expr, &Sink::Nothing, out),
            syn::Stmt::Item(item) => {
                self.errors
                    .refuse(item, "items inside a function are not printed: move it out of the function");
            }
            syn::Stmt::Macro(stmt) => self.refuse_macro(&stmt.mac),
        }
    }

    fn refuse_macro(&mut self, mac: &syn::Macro) {
        let name = mac.path.segments.last().map(|segment| segment.ident.to_string()).unwrap_or_default();
        let reason = match name.as_str() {
            "assert" | "assert_eq" | "assert_ne" | "debug_assert" | "debug_assert_eq" | "debug_assert_ne" => {
                "GPUs cannot panic: put the condition under `requires`, or write `const { assert!(..) }`"
            }
            "panic" | "unreachable" | "todo" | "unimplemented" => {
                "GPUs cannot panic: put the condition under `requires`"
            }
            "println" | "print" | "eprintln" | "dbg" => "GPUs do not print: write to a buffer",
            "vec" => "there is no heap on GPUs: use an array `[x; N]`, or `shared(N)`",
            _ => {
                "macros are not expanded in the kernel language: write what it expands to, or call a #[device] function"
            }
        };
        self.errors.refuse(mac, reason);
    }

    fn local(&mut self, local: &syn::Local, top: bool, out: &mut Vec<Stmt>) {
        let (pattern, written) = match &local.pat {
            syn::Pat::Type(typed) => (&*typed.pat, Some(&*typed.ty)),
            other => (other, None),
        };
        let Some(init) = &local.init else {
            self.errors
                .refuse(local, "give the variable its value here: C++ does not check that it gets one");
            return;
        };
        if let Some((_, diverge)) = &init.diverge {
            self.errors.refuse(diverge, "`let .. else` is not part of the kernel language: write an `if`");
            return;
        }
        let value = &*init.expr;
        if let syn::Pat::Wild(_) = pattern {
            let value = self.expr(value, None, Stands::Alone);
            if matches!(value.kind, Kind::Call(_)) {
                out.push(Stmt::Discard(value));
            } else if value.kind != Kind::Refused {
                self.errors.refuse(local, "this has no effect: only the result of a call can be left unused");
            }
            return;
        }
        let Some((name, mutable)) = self.pattern(pattern) else { return };
        let rust = name.to_string();
        if let Some(call) = shared_call(value) {
            self.shared_array(name, written, call, top, out);
            return;
        }
        let ty = match written {
            Some(ty) => match self.reader().read(ty) {
                Some(ty) => Some(ty),
                None => {
                    // The variable is known, to leave no second error where it is used.
                    self.expr(value, None, Stands::Alone);
                    self.declare(&rust, None, mutable);
                    return;
                }
            },
            None => None,
        };
        if needs_statements(value) {
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
            // The value is of the scope before the name; the name is not visible in it.
            let hidden = self.scopes.fresh(&rust);
            let place = Expr::new(
                Kind::Name { name: hidden.clone(), of: NameOf::Mutable },
                Some(ty.clone()),
                name.span(),
            );
            out.push(Stmt::Let { name: hidden.clone(), ty: Some(ty.clone()), mutable: true, value: None });
            self.deliver(value, &Sink::Assign(place), out);
            self.scopes.bind(&rust, Meaning { cpp: hidden, ty: Some(ty), mutable, passed: Passed::Value });
            return;
        }
        let value = self.expr(value, ty.as_ref(), Stands::Alone);
        if ty.is_none() && value.is_untyped() {
            self.errors.refuse(
                &init.expr,
                "nothing here gives the literal a type, and C++ would take `int`: add a suffix, `0u32`, or write the type",
            );
        }
        if matches!(value.ty, Some(Type::Buffer(_) | Type::Shared(_))) {
            self.errors.refuse(&init.expr, "memory has one name: use it, or pass it to a #[device] function");
        }
        let known = ty.clone().or_else(|| value.ty.clone());
        let cpp = self.declare(&rust, known, mutable);
        out.push(Stmt::Let { name: cpp, ty, mutable, value: Some(value) });
    }

    fn declare(&mut self, rust: &str, ty: Option<Type>, mutable: bool) -> String {
        let cpp = self.scopes.fresh(rust);
        self.scopes.bind(rust, Meaning { cpp: cpp.clone(), ty, mutable, passed: Passed::Value });
        cpp
    }

    /// The name that a pattern binds.
    fn pattern<'p>(&mut self, pattern: &'p syn::Pat) -> Option<(&'p syn::Ident, bool)> {
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
        top: bool,
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
                self.errors.refuse(&written, "`shared(..)` is a `Shared<T>`");
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
                format_args!("write the type of the elements: `let mut {rust}: Shared<f32> = ..`"),
            );
            self.declare(&rust, None, true);
            return;
        };
        if !(top && self.kernel) {
            self.errors.refuse(
                call,
                "threadgroup arrays are declared at the top level of a kernel's body, and passed on",
            );
        }
        let mut arguments = call.args.iter();
        let (Some(length), None) = (arguments.next(), arguments.next()) else {
            self.errors.refuse(call, "write the number of elements: `shared(N)`");
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

    /// Lowers an expression into statements that put its value where it goes.
    fn deliver(&mut self, expr: &syn::Expr, sink: &Sink, out: &mut Vec<Stmt>) {
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
                    Kind::Refused => {}
                    _ => self.errors.refuse(expr, "this has no effect: assign it, or leave it out"),
                }
            }
            Sink::Return => {
                let expected = self.result.clone();
                let value = self.expr(expr, expected.as_ref(), Stands::Alone);
                out.push(Stmt::Return(Some(value)));
            }
            Sink::Assign(place) => {
                let value = self.expr(expr, place.ty.as_ref(), Stands::Alone);
                out.push(Stmt::Assign { place: place.clone(), op: None, value });
            }
        }
    }

    /// Lowers what is a statement wherever it stands; `false` for an expression with a value.
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

    fn no_label(&mut self, label: Option<&syn::Label>) {
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

    fn condition(&mut self, condition: &syn::Expr) -> Expr {
        if let syn::Expr::Let(pattern) = condition {
            self.errors.refuse(pattern, "patterns are not part of the kernel language: compare with `==`");
            return Expr::refused(pattern.span());
        }
        self.expr(condition, Some(&BOOL), Stands::Alone)
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
                self.errors.refuse(conditional, "an `if` with a value has an `else`");
            }
            None => {}
        }
        out.push(Stmt::If { condition, then, otherwise });
    }

    /// Lowers what a loop repeats, and notes where threads meet in it.
    fn looped<R>(&mut self, attributes: &[syn::Attribute], lower: impl FnOnce(&mut Self) -> R) -> R {
        let before = std::mem::take(&mut self.convergence);
        let lowered = lower(self);
        let inside = std::mem::replace(&mut self.convergence, before);
        self.convergence.add(&inside);
        if let Some(id) = NodeId::of(attributes) {
            self.annotations.loops.insert(id, inside);
        }
        lowered
    }

    fn for_loop(&mut self, looped: &syn::ExprForLoop, out: &mut Vec<Stmt>) {
        self.no_label(looped.label.as_ref());
        let unroll = looped.attrs.iter().any(is_unroll);
        let Some(range) = self.range(&looped.expr) else {
            self.skip_loop(looped);
            return;
        };
        let mut first = self.expr(range.start, None, Stands::Beside);
        let mut last = self.expr(range.end, None, Stands::Beside);
        let ty = first.ty.clone().or_else(|| last.ty.clone());
        if ty.is_none() && first.is_untyped() && last.is_untyped() {
            self.errors.refuse(
                &looped.expr,
                "nothing gives the range a type, and C++ would take `int`: add a suffix, `0u32..4`",
            );
        }
        if let Some(ty) = &ty {
            adopt(&mut first, ty);
            adopt(&mut last, ty);
        }
        let walk = self.walk(&range, ty.as_ref(), &mut first, out);
        self.scopes.enter();
        let name = match &*looped.pat {
            syn::Pat::Ident(ident) if ident.mutability.is_some() => {
                self.errors.refuse(
                    &looped.pat,
                    "assigning to the variable of a C++ loop changes the loop: copy it to another variable",
                );
                ident.ident.to_string()
            }
            syn::Pat::Wild(_) => "unused".to_string(),
            pattern => self.pattern(pattern).map(|(name, _)| name.to_string()).unwrap_or_default(),
        };
        let variable = self.scopes.fresh(&name);
        let meaning =
            Meaning { cpp: variable.clone(), ty: ty.clone(), mutable: false, passed: Passed::Value };
        if !matches!(&*looped.pat, syn::Pat::Wild(_)) {
            self.scopes.bind(&name, meaning);
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
        out.push(Stmt::For(Box::new(For {
            variable,
            bound,
            extra,
            ty,
            start: first,
            end: last,
            walk,
            named: !matches!(&*looped.pat, syn::Pat::Wild(_)),
            unroll,
            body,
        })));
    }

    /// How a range is walked, from `first` on.
    fn walk(&mut self, range: &Range<'_>, ty: Option<&Type>, first: &mut Expr, out: &mut Vec<Stmt>) -> Walk {
        match (range.reverse, range.inclusive, range.step) {
            (false, false, None) => Walk::Forward,
            (false, true, None) => Walk::Inclusive,
            (true, false, None) => Walk::Reverse,
            (false, false, Some(step)) => {
                let step = self.expr(step, Some(&USIZE), Stands::Beside);
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

    /// A part of a range that is printed twice: what may change is evaluated before, into a variable.
    fn fixed(&mut self, value: Expr, name: &str, out: &mut Vec<Stmt>) -> Expr {
        if value.is_fixed() {
            return value;
        }
        let (name, ty, span) = (self.scopes.fresh(name), value.ty.clone(), value.span);
        out.push(Stmt::Let { name: name.clone(), ty: None, mutable: false, value: Some(value) });
        Expr::new(Kind::Name { name, of: NameOf::Fixed }, ty, span)
    }

    /// Checks the body of a loop that is refused, for what else is wrong in it.
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
                        "the range has both ends: `a..b`; for a loop without an end write `loop`",
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
                        // What `rev` does to steps, and to a second `rev`, is refused by the loop.
                        let twice = range.reverse || range.step.is_some();
                        if twice {
                            self.errors.refuse(call, "write one range, walked one way");
                            return None;
                        }
                        Some(Range { whole: expr, reverse: true, ..range })
                    }
                    ("step_by", 1) => {
                        let range = self.range(&call.receiver)?;
                        if range.step.is_some() {
                            self.errors.refuse(call, "write one step");
                            return None;
                        }
                        Some(Range { whole: expr, step: call.args.first(), ..range })
                    }
                    _ => {
                        self.errors.refuse(
                            expr,
                            "a loop of the kernel language walks a range: `for i in a..b`, and index with `i`",
                        );
                        None
                    }
                }
            }
            _ => {
                self.errors.refuse(
                    expr,
                    "a loop of the kernel language walks a range: `for i in a..b`, and index with `i`",
                );
                None
            }
        }
    }

    fn assign(
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
                    // The blocks may read what they assign to, and the place is evaluated after them.
                    if matches!(place.kind, Kind::Name { .. })
                        && !matches!(strip(right), syn::Expr::Struct(_))
                    {
                        self.deliver(right, &Sink::Assign(place), out);
                    } else {
                        self.errors
                            .refuse(right, "bind the value first: `let value: T = ..`, and assign `value`");
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
                // `a &= b` of two bools is an int in C++ only on the way: the assignment makes it a bool again.
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
                    (Kind::Refused, _) => None,
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
                        Kind::Refused => return None,
                        _ => break,
                    }
                }
                self.errors.refuse(expr, "this is no place: assign to a variable, an element or a field");
                None
            }
            syn::Expr::Tuple(_) => {
                self.errors
                    .refuse(expr, "tuples are not part of the kernel language: assign each value by itself");
                None
            }
            other => {
                self.errors.refuse(other, "this is no place: assign to a variable, an element or a field");
                None
            }
        }
    }

    fn const_block(&mut self, block: &syn::ExprConst, out: &mut Vec<Stmt>) {
        for stmt in &block.block.stmts {
            let mac = match stmt {
                syn::Stmt::Macro(stmt) => Some(&stmt.mac),
                syn::Stmt::Expr(syn::Expr::Macro(expr), _) => Some(&expr.mac),
                _ => None,
            };
            let Some(mac) = mac.filter(|mac| mac.path.is_ident("assert")) else {
                self.errors.refuse(stmt, "a `const` block holds `assert!(condition, \"message\")`");
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
                self.errors.refuse(mac, "the message is one string, without values");
                continue;
            }
            if let Some(condition) = arguments.first() {
                let condition = self.constant(condition, Some(Scalar::Bool));
                out.push(Stmt::Assert { condition, message });
            }
        }
    }

    /// The type of a struct literal, from its path.
    fn struct_type(&mut self, literal: &syn::ExprStruct) -> Option<Type> {
        let mut path = literal.path.clone();
        for segment in &mut path.segments {
            if let syn::PathArguments::AngleBracketed(arguments) = &mut segment.arguments {
                arguments.colon2_token = None;
            }
        }
        self.reader().read(&syn::Type::Path(syn::TypePath { qself: None, path }))
    }

    fn struct_literal(&mut self, literal: &syn::ExprStruct, sink: &Sink, out: &mut Vec<Stmt>) {
        if let Some(rest) = &literal.rest {
            self.errors.refuse(rest, "name every field: C++ would leave the others as they are");
        }
        let expected = match sink {
            Sink::Assign(place) => place.ty.clone(),
            _ => self.result.clone(),
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
                (Expr::new(kind, Some(ty), literal.span()), true)
            }
        };
        for field in &literal.fields {
            let syn::Member::Named(member) = &field.member else {
                self.errors.refuse(&field.member, "structs of the kernel language have named fields");
                continue;
            };
            let kind = Kind::Field(Box::new(place.clone()), names::field(&member.to_string()));
            let place = Expr::new(kind, None, member.span());
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

    // Expressions.

    /// An operand of an operator, in the type of its neighbour where that is known.
    fn operand(&mut self, expr: &syn::Expr, expected: Option<&Type>, stands: Stands) -> Expr {
        let mut value = self.expr(expr, None, stands);
        // `x + 1` stays as written, for C++ converts the literal to the type of x. A float's neighbour is a float.
        if let (Kind::Int { value: digits, .. }, Some(ty)) = (&value.kind, expected)
            && value.ty.is_none()
            && *digits > i32::MAX as u64
        {
            value.ty = Some(ty.clone());
        }
        value
    }

    /// Whether no call can change the value of an operand: it may stand beside one that writes.
    fn is_still(&self, expr: &syn::Expr) -> bool {
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

    fn operands(&mut self, op: Binary, left: &Expr, right: &Expr, whole: &syn::ExprBinary) {
        if left.is_untyped() && (right.is_untyped() || op.is_shift()) {
            self.errors.refuse(
                whole,
                "nothing gives the literals a type, and C++ would take `int`: add a suffix, `1u32`",
            );
        }
        if op.is_bitwise() && (left.scalar() == Some(Scalar::Bool) || right.scalar() == Some(Scalar::Bool)) {
            self.annotations.bool_operators.extend(NodeId::of_operator(whole));
        }
    }

    fn expr(&mut self, expr: &syn::Expr, expected: Option<&Type>, stands: Stands) -> Expr {
        let span = expr.span();
        let reason = match expr {
            syn::Expr::Paren(inner) => return self.expr(&inner.expr, expected, stands),
            syn::Expr::Group(inner) => return self.expr(&inner.expr, expected, stands),
            syn::Expr::Lit(literal) => return self.literal(&literal.lit, expected),
            syn::Expr::Path(path) => return self.path(path),
            syn::Expr::Unary(unary) => return self.unary(unary, expected, stands),
            syn::Expr::Binary(binary) => return self.binary(binary, stands),
            syn::Expr::Cast(cast) => return self.cast(cast, stands),
            syn::Expr::Index(index) => return self.index(index),
            syn::Expr::Field(field) => {
                let base = self.expr(&field.base, None, stands);
                return match &field.member {
                    syn::Member::Named(name) => {
                        Expr::new(Kind::Field(Box::new(base), names::field(&name.to_string())), None, span)
                    }
                    syn::Member::Unnamed(_) => {
                        self.errors.refuse(
                            &field.member,
                            "tuples are not part of the kernel language: name the field",
                        );
                        Expr::refused(span)
                    }
                };
            }
            syn::Expr::Call(call) => return self.call(call, expected, stands),
            syn::Expr::MethodCall(call) => return self.method(call, expected, stands),
            syn::Expr::Array(array) => return self.array(array, expected),
            syn::Expr::Repeat(repeat) => {
                let element = match expected {
                    Some(Type::Array(element, _)) => Some((**element).clone()),
                    _ => None,
                };
                let value = self.expr(&repeat.expr, element.as_ref(), Stands::Beside);
                if element.is_none() && value.is_untyped() {
                    self.errors.refuse(
                        &repeat.expr,
                        "nothing gives the literal a type, and C++ would take `int`: add a suffix, `0u32`",
                    );
                    return Expr::refused(span);
                }
                let length = self.constant(&repeat.len, Some(Scalar::Usize));
                let ty = element.or_else(|| value.ty.clone());
                let ty = ty.map(|ty| Type::Array(Box::new(ty), Box::new(length.clone())));
                return Expr::new(Kind::Repeat(Box::new(value), Box::new(length)), ty, span);
            }
            syn::Expr::If(conditional) if !needs_statements(expr) => {
                return self.choose(conditional, expected, stands);
            }
            syn::Expr::Block(block) if !needs_statements(expr) => match &block.block.stmts[..] {
                [syn::Stmt::Expr(inner, None)] => return self.expr(inner, expected, stands),
                _ => "a block with a value ends in an expression",
            },
            syn::Expr::If(_) | syn::Expr::Block(_) => {
                "blocks with statements stand alone in C++: bind the value first, `let x: T = ..`, and use `x`"
            }
            syn::Expr::Struct(_) => "bind the struct first, `let s = ..`, and use `s`",
            syn::Expr::Reference(reference) => {
                if matches!(strip(&reference.expr), syn::Expr::Index(_)) {
                    "there are no references to elements: pass the memory or the array, and the index"
                } else {
                    "references are arguments of functions only: use the value"
                }
            }
            syn::Expr::Match(_) => "`match` is not part of the kernel language: write `if` and `else if`",
            syn::Expr::Let(_) => "patterns are not part of the kernel language: compare with `==`",
            syn::Expr::Closure(_) => "closures do not exist on GPUs: write a #[device] function",
            syn::Expr::Macro(mac) => {
                self.refuse_macro(&mac.mac);
                return Expr::refused(span);
            }
            syn::Expr::Tuple(tuple) if tuple.elems.is_empty() => {
                "the kernel language has no `()`: leave it out"
            }
            syn::Expr::Tuple(_) => {
                "tuples are not part of the kernel language: use a #[device] struct or an array"
            }
            syn::Expr::Range(_) => "ranges are for `for` loops: write the bounds",
            syn::Expr::Try(_) => "there is no `?` on GPUs: return a flag",
            syn::Expr::Unsafe(_) => "nothing in the kernel language is unsafe: leave out the block",
            syn::Expr::Async(_) | syn::Expr::Await(_) => {
                "there is no `async` on GPUs: use `barrier()` to wait"
            }
            syn::Expr::Assign(_) => "an assignment has no value: write it as a statement",
            syn::Expr::While(_) | syn::Expr::ForLoop(_) | syn::Expr::Loop(_) => {
                "loops have no value in C++: assign to a variable in the loop"
            }
            syn::Expr::Break(_) | syn::Expr::Continue(_) | syn::Expr::Return(_) => {
                "write it as a statement of its own"
            }
            syn::Expr::Const(_) => "a `const` block is a statement: `const { assert!(..) }`",
            _ => "this is not part of the kernel language",
        };
        self.errors.refuse(expr, reason);
        Expr::refused(span)
    }

    fn literal(&mut self, literal: &syn::Lit, expected: Option<&Type>) -> Expr {
        let span = literal.span();
        let reason = match literal {
            syn::Lit::Int(int) => return self.int(int, expected),
            syn::Lit::Float(float) => match float.suffix() {
                "" | "f32" => {
                    let digits = float.base10_digits().to_string();
                    return Expr::new(Kind::Float(digits), Some(F32), span);
                }
                _ => "f64 does not exist on Apple's GPUs: write f32",
            },
            syn::Lit::Bool(flag) => return Expr::new(Kind::Bool(flag.value), Some(BOOL), span),
            syn::Lit::Str(_) | syn::Lit::ByteStr(_) | syn::Lit::CStr(_) => "strings do not exist on GPUs",
            syn::Lit::Char(_) => "char does not exist on GPUs: write the number",
            syn::Lit::Byte(byte) => {
                let kind = Kind::Int { value: u64::from(byte.value()), hex: false };
                return Expr::new(kind, Some(Type::Scalar(Scalar::U8)), span);
            }
            _ => "this literal is not part of the kernel language",
        };
        self.errors.refuse(literal, reason);
        Expr::refused(span)
    }

    fn int(&mut self, int: &syn::LitInt, expected: Option<&Type>) -> Expr {
        let span = int.span();
        // Of a generic argument the sign is part of the number.
        if let Some(digits) = int.base10_digits().strip_prefix('-') {
            let magnitude = syn::LitInt::new(&format!("{digits}{}", int.suffix()), span);
            let magnitude = self.int(&magnitude, expected);
            let ty = magnitude.ty.clone();
            return settled(Expr::new(Kind::Neg(Box::new(magnitude)), ty, span));
        }
        let suffix = int.suffix();
        if suffix == "f32" {
            return Expr::new(Kind::Float(int.base10_digits().to_string()), Some(F32), span);
        }
        let ty = match (suffix, Scalar::of(suffix)) {
            ("", _) => match expected {
                Some(Type::Scalar(scalar)) if scalar.is_integer() => Some(Type::Scalar(*scalar)),
                _ => None,
            },
            (_, Some(scalar)) => Some(Type::Scalar(scalar)),
            ("f64", _) => {
                self.errors.refuse(int, "f64 does not exist on Apple's GPUs: write f32");
                return Expr::refused(span);
            }
            ("isize", _) => {
                self.errors.refuse(int, "isize differs between machines: use i32 or i64");
                return Expr::refused(span);
            }
            _ => {
                self.errors.refuse(int, "GPUs have no such integer: use u64 or i64");
                return Expr::refused(span);
            }
        };
        let Ok(value) = int.base10_digits().parse::<u64>() else {
            self.errors.refuse(int, "integers have at most 64 bits");
            return Expr::refused(span);
        };
        let text = int.to_string();
        let hex = text.starts_with("0x") || text.starts_with("0b");
        Expr::new(Kind::Int { value, hex }, ty, span)
    }

    fn path(&mut self, path: &syn::ExprPath) -> Expr {
        let span = path.span();
        if path.qself.is_some() {
            self.errors
                .refuse(path, "associated constants are not part of the kernel language: use a #[constant]");
            return Expr::refused(span);
        }
        if let Some(ident) = path.path.get_ident() {
            let rust = ident.to_string();
            if let Some(meaning) = self.scopes.find(&rust) {
                let of = match meaning.passed {
                    Passed::Params => NameOf::Params,
                    _ if meaning.mutable => NameOf::Mutable,
                    _ => NameOf::Fixed,
                };
                return Expr::new(Kind::Name { name: meaning.cpp.clone(), of }, meaning.ty.clone(), span);
            }
            match self.generics.iter().find(|parameter| parameter.name() == rust) {
                Some(Parameter::Const { ty, .. }) => {
                    let ty = Some(Type::Scalar(*ty));
                    return Expr::new(Kind::Name { name: rust, of: NameOf::Const }, ty, span);
                }
                Some(Parameter::Type { .. }) => {
                    self.errors.refuse(path, "this is a type, not a value");
                    return Expr::refused(span);
                }
                None => {}
            }
        }
        let segments = &path.path.segments;
        let Some(last) = segments.last() else { return Expr::refused(span) };
        let name = last.ident.to_string();
        if let Some(ty) = self.scalar_path(&path.path) {
            return match intrinsics::limit(&name) {
                Some(result) => {
                    let of = result.map(Type::Scalar).or_else(|| Some(ty.clone()));
                    Expr::new(Kind::Limit(ty, name), of, span)
                }
                None => {
                    self.errors.refuse(
                        path,
                        "the kernel language has MAX, MIN, BITS of integers and MAX, MIN, INFINITY, NEG_INFINITY, NAN, MIN_POSITIVE, EPSILON of f32: write the number",
                    );
                    Expr::refused(span)
                }
            };
        }
        if segments.iter().any(|segment| !segment.arguments.is_none()) {
            self.errors.refuse(
                path,
                "generic constants are not part of the kernel language: write a #[device] function",
            );
            return Expr::refused(span);
        }
        if segments.len() > 1 && looks_like_type(&segments[segments.len() - 2].ident.to_string()) {
            self.errors
                .refuse(path, "associated constants are not part of the kernel language: use a #[constant]");
            return Expr::refused(span);
        }
        if of_std(&path.path) {
            self.errors.refuse(
                path,
                "items of the standard library do not exist on GPUs: give a #[constant] of yours the number",
            );
            return Expr::refused(span);
        }
        self.depends.item(&path.path);
        Expr::new(Kind::Name { name: names::global(&name), of: NameOf::Const }, None, span)
    }

    /// The type before the last segment, where it is a scalar or a type parameter.
    fn scalar_path(&mut self, path: &syn::Path) -> Option<Type> {
        let mut segments = path.segments.iter().rev().skip(1);
        let owner = segments.next().filter(|segment| segment.arguments.is_none())?.ident.to_string();
        if segments.next().is_some_and(|outer| outer.ident != "half") {
            return None;
        }
        if let Some(scalar) = Scalar::of(&owner) {
            return Some(Type::Scalar(scalar));
        }
        self.generics.iter().find_map(|parameter| match parameter {
            Parameter::Type { name, .. } if *name == owner => Some(Type::Parameter(owner.clone())),
            _ => None,
        })
    }

    fn unary(&mut self, unary: &syn::ExprUnary, expected: Option<&Type>, stands: Stands) -> Expr {
        let span = unary.span();
        match unary.op {
            syn::UnOp::Neg(_) => {
                let operand = self.expr(&unary.expr, expected, stands);
                let ty = operand.ty.clone();
                settled(Expr::new(Kind::Neg(Box::new(operand)), ty, span))
            }
            syn::UnOp::Not(_) => {
                let operand = self.expr(&unary.expr, expected, stands);
                if operand.is_untyped() {
                    self.errors
                        .refuse(&unary.expr, "nothing gives the literal a type: add a suffix, `!0u32`");
                }
                let ty = operand.ty.clone();
                Expr::new(Kind::Not(Box::new(operand)), ty, span)
            }
            syn::UnOp::Deref(_) => {
                let passed = self.passed(&unary.expr);
                if let (syn::Expr::Path(path), Some(Passed::Reference)) = (strip(&unary.expr), passed) {
                    return self.path(path);
                }
                self.errors.refuse(unary, "only a `&mut` parameter can be dereferenced: leave out the `*`");
                Expr::refused(span)
            }
            _ => {
                self.errors.refuse(unary, "this operator is not part of the kernel language");
                Expr::refused(span)
            }
        }
    }

    fn binary(&mut self, binary: &syn::ExprBinary, stands: Stands) -> Expr {
        let span = binary.op.span();
        let Some(op) = operator(&binary.op) else {
            self.errors.refuse(binary, "an assignment has no value: write it as a statement");
            return Expr::refused(span);
        };
        if matches!(op, Binary::And | Binary::Or) {
            // Both languages evaluate the right side after the left, or not at all.
            let left = self.expr(&binary.left, Some(&BOOL), stands);
            let right = self.expr(&binary.right, Some(&BOOL), stands);
            return Expr::new(Kind::Binary(op, Box::new(left), Box::new(right)), Some(BOOL), span);
        }
        let beside = |still: bool| if still { stands } else { Stands::Beside };
        let (left_stands, right_stands) =
            (beside(self.is_still(&binary.right)), beside(self.is_still(&binary.left)));
        let mut left = self.operand(&binary.left, None, left_stands);
        let expected = if op.is_shift() { None } else { left.ty.as_ref() };
        let right = self.operand(&binary.right, expected, right_stands);
        if let (Kind::Int { value, .. }, None) = (&left.kind, &left.ty)
            && *value > i32::MAX as u64
            && !op.is_shift()
        {
            left.ty.clone_from(&right.ty);
        }
        self.operands(op, &left, &right, binary);
        let ty = if op.is_comparison() {
            Some(BOOL)
        } else if op.is_shift() {
            left.ty.clone()
        } else {
            left.ty.clone().or_else(|| right.ty.clone())
        };
        Expr::new(Kind::Binary(op, Box::new(left), Box::new(right)), ty, span)
    }

    fn cast(&mut self, cast: &syn::ExprCast, stands: Stands) -> Expr {
        let span = cast.span();
        let value = self.expr(&cast.expr, None, stands);
        let scalar = match &*cast.ty {
            syn::Type::Path(path) if path.qself.is_none() => {
                path.path.get_ident().and_then(|name| Scalar::of(&name.to_string()))
            }
            _ => None,
        };
        match scalar {
            Some(Scalar::F16 | Scalar::Bf16) => {
                self.errors.refuse(
                    &cast.ty,
                    "`as` does not convert to it: write `f16::from_f32(x)` or `bf16::from_f32(x)`",
                );
                Expr::refused(span)
            }
            Some(scalar) => Expr::new(Kind::Cast(Box::new(value), scalar), Some(Type::Scalar(scalar)), span),
            None => {
                // The reader knows why f64 and its like are refused.
                if self.reader().read(&cast.ty).is_some() {
                    self.errors.refuse(
                        &cast.ty,
                        "`as` converts between scalars: write `T::from_f32(x)` for a type parameter",
                    );
                }
                Expr::refused(span)
            }
        }
    }

    fn index(&mut self, index: &syn::ExprIndex) -> Expr {
        let span = index.span();
        let base = self.expr(&index.expr, None, Stands::Beside);
        if let syn::Expr::Range(range) = strip(&index.index) {
            self.errors.refuse(
                range,
                "slices are not part of the kernel language: index one element, or `load::<N>(i)`",
            );
            return Expr::refused(span);
        }
        let position = self.expr(&index.index, None, Stands::Beside);
        let ty = match &base.ty {
            Some(Type::Array(element, _) | Type::Buffer(element) | Type::Shared(element)) => {
                Some((**element).clone())
            }
            _ => None,
        };
        Expr::new(Kind::Index(Box::new(base), Box::new(position)), ty, span)
    }

    fn array(&mut self, array: &syn::ExprArray, expected: Option<&Type>) -> Expr {
        let mut element = match expected {
            Some(Type::Array(element, _)) => Some((**element).clone()),
            _ => None,
        };
        let mut elements: Vec<Expr> =
            array.elems.iter().map(|value| self.expr(value, element.as_ref(), Stands::Beside)).collect();
        if element.is_none() {
            element = elements.iter().find_map(|value| value.ty.clone());
            if let Some(ty) = &element {
                elements.iter_mut().for_each(|value| adopt(value, ty));
            }
        }
        let first_untyped = elements.first().is_some_and(Expr::is_untyped);
        if elements.is_empty() {
            self.errors.refuse(array, "C++ has no empty arrays: leave it out");
            return Expr::refused(array.span());
        }
        if element.is_none() && first_untyped {
            self.errors.refuse(
                array,
                "nothing gives the first literal a type, and C++ would take `int`: add a suffix, `[0u32, ..]`",
            );
            return Expr::refused(array.span());
        }
        let length = Expr::new(Kind::Int { value: elements.len() as u64, hex: false }, None, array.span());
        let ty = element.map(|ty| Type::Array(Box::new(ty), Box::new(length)));
        Expr::new(Kind::Array(elements), ty, array.span())
    }

    fn choose(&mut self, conditional: &syn::ExprIf, expected: Option<&Type>, stands: Stands) -> Expr {
        let span = conditional.span();
        let condition = self.expr(&conditional.cond, Some(&BOOL), stands);
        let then = tail(&conditional.then_branch);
        let otherwise = conditional.else_branch.as_ref().and_then(|(_, branch)| match &**branch {
            syn::Expr::Block(block) => tail(&block.block),
            nested => Some(nested),
        });
        let (Some(then), Some(otherwise)) = (then, otherwise) else {
            self.errors.refuse(conditional, "an `if` with a value has a value in both branches");
            return Expr::refused(span);
        };
        let mut then = self.expr(then, expected, stands);
        let mut otherwise = self.expr(otherwise, expected, stands);
        let ty = then.ty.clone().or_else(|| otherwise.ty.clone());
        if let Some(ty) = &ty {
            adopt(&mut then, ty);
            adopt(&mut otherwise, ty);
        }
        if ty.is_none() && then.is_untyped() != otherwise.is_untyped() {
            self.annotations.beside_literals.extend(NodeId::of(&conditional.attrs));
        }
        settled(Expr::new(Kind::Choose(Box::new(condition), Box::new(then), Box::new(otherwise)), ty, span))
    }

    // Calls.

    fn call(&mut self, call: &syn::ExprCall, expected: Option<&Type>, stands: Stands) -> Expr {
        let span = call.span();
        let path = match strip(&call.func) {
            syn::Expr::Path(path) if path.qself.is_none() => &path.path,
            other => {
                self.errors.refuse(other, "call a function by its name");
                return Expr::refused(span);
            }
        };
        let Some(last) = path.segments.last() else { return Expr::refused(span) };
        let name = last.ident.to_string();
        if path.segments.len() == 1 {
            if self.scopes.find(&name).is_some() {
                self.errors.refuse(
                    path,
                    "function values do not exist on GPUs: call a #[device] function by its name",
                );
                return Expr::refused(span);
            }
            if name == "shared" {
                self.errors.refuse(
                    call,
                    "a threadgroup array is bound to a variable: `let mut tile: Shared<f32> = shared(N);`",
                );
                return Expr::refused(span);
            }
            if let Some(function) = intrinsics::find(&name) {
                if !last.arguments.is_none() {
                    self.errors.refuse(&last.arguments, "leave out the types: the arguments have them");
                }
                return self.intrinsic(call, &name, function, expected, stands);
            }
            if name == self.name {
                self.errors.refuse(path, "recursion does not exist on GPUs: write a loop");
                return Expr::refused(span);
            }
        } else if let Some(ty) = self.scalar_path(path) {
            return self.associated(call, ty, &name);
        } else if path.segments.len() >= 2 {
            let owner = &path.segments[path.segments.len() - 2];
            if owner.ident == "Fragment" {
                return self.fragment(call, owner, &name);
            }
            if looks_like_type(&owner.ident.to_string()) {
                self.errors.refuse(
                    path,
                    "associated functions are not part of the kernel language: write a #[device] function",
                );
                return Expr::refused(span);
            }
        }
        if looks_like_type(&name) {
            self.errors.refuse(
                path,
                "tuple structs and enums are not part of the kernel language: use named fields",
            );
            return Expr::refused(span);
        }
        if of_std(path) {
            self.errors.refuse(
                path,
                "functions of the standard library do not exist on GPUs: write the method or intrinsic, or a #[device] function",
            );
            return Expr::refused(span);
        }
        let generics = self.reader().arguments(&last.arguments).unwrap_or_default();
        if generics.is_empty() {
            self.depends.deducible(path);
        }
        let mut effect = false;
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let (value, mutable) = self.argument(argument, true);
            effect |= mutable;
            if value.is_untyped() {
                self.depends.typed_argument(path, n, argument.span());
            }
            arguments.push(value);
        }
        if effect {
            self.effect(call, stands);
        } else if stands == Stands::Beside {
            self.depends.without_barrier(path);
        }
        let module = module_of(path);
        self.convergence.functions.insert(quote!(#module).to_string(), module);
        self.annotations.device_calls.extend(NodeId::of(&call.attrs));
        self.depends.item(path);
        let function = names::global(&name);
        Expr::new(Kind::Call(Call { function, context: true, generics, arguments }), None, span)
    }

    /// Refuses a call with effects beside others.
    fn effect(&mut self, call: &impl quote::ToTokens, stands: Stands) {
        if stands == Stands::Beside {
            self.errors.refuse(
                call,
                "the call writes, and C++ may do that before or after the rest of the expression: bind its result first, `let x = ..`",
            );
        }
    }

    /// How the variable that an expression names was passed.
    fn passed(&self, expr: &syn::Expr) -> Option<&Passed> {
        match strip(expr) {
            syn::Expr::Path(path) => {
                self.scopes.find(&path.path.get_ident()?.to_string()).map(|meaning| &meaning.passed)
            }
            _ => None,
        }
    }

    /// An argument of a function, and whether the function may write to it.
    fn argument(&mut self, argument: &syn::Expr, values_by_reference: bool) -> (Expr, bool) {
        let (inner, mutable) = match strip(argument) {
            syn::Expr::Reference(reference) => (&*reference.expr, Some(reference.mutability.is_some())),
            other => (other, None),
        };
        let inner = match (mutable, strip(inner)) {
            // `&mut *x` passes on what `x` borrows.
            (Some(_), syn::Expr::Unary(syn::ExprUnary { op: syn::UnOp::Deref(_), expr, .. })) => &**expr,
            _ => inner,
        };
        let Some(mutable) = mutable else {
            let value = self.expr(inner, None, Stands::Beside);
            let writes = matches!(self.passed(inner), Some(Passed::MemoryMut | Passed::Reference));
            return (value, writes);
        };
        let mut base = strip(inner);
        while let syn::Expr::Field(field) = base {
            base = strip(&field.base);
        }
        let element = matches!(base, syn::Expr::Index(_)) && !mutable && !values_by_reference;
        if !matches!(base, syn::Expr::Path(_)) && !element {
            self.errors.refuse(
                argument,
                "there are no references to elements: pass the memory or the array, and the index",
            );
            return (Expr::refused(argument.span()), mutable);
        }
        let value = self.expr(inner, None, Stands::Beside);
        let is_memory = matches!(value.ty, Some(Type::Buffer(_) | Type::Shared(_)));
        if !mutable && !is_memory && values_by_reference && value.kind != Kind::Refused {
            self.errors.refuse(argument, "values are passed by value: leave out the `&`");
        }
        (value, mutable)
    }

    fn intrinsic(
        &mut self,
        call: &syn::ExprCall,
        name: &str,
        function: intrinsics::Function,
        expected: Option<&Type>,
        stands: Stands,
    ) -> Expr {
        let span = call.span();
        let mut element = None;
        let mut arguments = Vec::new();
        let mut effect = false;
        for (n, argument) in call.args.iter().enumerate() {
            let takes = function.takes.get(n).copied().unwrap_or(Takes::Any);
            if matches!(takes, Takes::Memory | Takes::MemoryMut) {
                let (value, _) = self.argument(argument, true);
                if let Some(Type::Buffer(of) | Type::Shared(of)) = &value.ty {
                    element = Some((**of).clone());
                } else if value.kind != Kind::Refused {
                    self.errors.refuse(argument, "this works on memory: pass a `Buffer` or a `Shared`");
                }
                effect |= takes == Takes::MemoryMut;
                arguments.push(value);
                continue;
            }
            let wanted = match takes {
                Takes::Same => None,
                Takes::Element => element.clone(),
                _ => taken(takes),
            };
            let mut value = self.expr(argument, wanted.as_ref(), Stands::Beside);
            if takes == Takes::Element
                && let Some(ty) = &element
            {
                adopt(&mut value, ty);
            }
            arguments.push(value);
        }
        let same = self.same(function.takes, &mut arguments, None, expected, call);
        if effect {
            self.effect(call, stands);
        }
        self.convergence.operation |= function.meets == Meets::Operation;
        self.convergence.barrier |= function.meets == Meets::Barrier;
        let ty = given(function.gives, same.as_ref(), element.as_ref());
        let call = Call {
            function: format!("ft_{name}"),
            context: function.context,
            generics: Vec::new(),
            arguments,
        };
        Expr::new(Kind::Call(call), ty, span)
    }

    /// The type that an intrinsic is generic in, given to the literals among its arguments.
    fn same(
        &mut self,
        takes: &[Takes],
        arguments: &mut [Expr],
        receiver: Option<&Expr>,
        expected: Option<&Type>,
        call: &impl quote::ToTokens,
    ) -> Option<Type> {
        let is_same = |n: usize| takes.get(n) == Some(&Takes::Same);
        let known = receiver.and_then(|receiver| receiver.ty.clone()).or_else(|| {
            arguments.iter().enumerate().filter(|(n, _)| is_same(*n)).find_map(|(_, value)| value.ty.clone())
        });
        let known = known.or_else(|| expected.cloned());
        // C++ takes the type from the receiver or the first argument, and converts the others to it.
        let first =
            receiver.is_none().then(|| takes.iter().position(|takes| *takes == Takes::Same)).flatten();
        for (n, value) in arguments.iter_mut().enumerate() {
            if is_same(n) && value.is_untyped() {
                match &known {
                    Some(ty) => adopt(value, ty),
                    None if Some(n) == first => self.errors.refuse(
                        call,
                        "nothing here gives the literal a type, and C++ would take `int`: add a suffix, `0u32`",
                    ),
                    None => {}
                }
            }
        }
        known
    }

    /// `T::from_f32(x)`, `f32::from_bits(x)`.
    fn associated(&mut self, call: &syn::ExprCall, ty: Type, name: &str) -> Expr {
        let span = call.span();
        let wanted = match (name, &ty) {
            ("from_f32", _) => F32,
            ("from_bits", Type::Scalar(Scalar::F32)) => U32,
            ("from_bits", Type::Scalar(Scalar::F16 | Scalar::Bf16)) => Type::Scalar(Scalar::U16),
            _ => {
                self.errors.refuse(
                    &call.func,
                    "the kernel language has `from_f32` and `from_bits`: write methods as `x.max(y)`",
                );
                return Expr::refused(span);
            }
        };
        let arguments =
            call.args.iter().map(|value| self.expr(value, Some(&wanted), Stands::Beside)).collect();
        let call = Call {
            function: format!("ft_{name}"),
            context: false,
            generics: vec![Generic::Type(ty.clone())],
            arguments,
        };
        Expr::new(Kind::Call(call), Some(ty), span)
    }

    /// `Fragment::<T>::zero()` and its like.
    fn fragment(&mut self, call: &syn::ExprCall, owner: &syn::PathSegment, name: &str) -> Expr {
        let span = call.span();
        let takes: &[Takes] = match name {
            "zero" => &[],
            "filled" => &[Takes::Any],
            "load" | "load_transposed" => &[Takes::Memory, Takes::U32, Takes::U32],
            "multiply_accumulate" => &[Takes::Any, Takes::Any, Takes::Any],
            _ => {
                self.errors.refuse(
                    &call.func,
                    "`Fragment` has zero, filled, load, load_transposed and multiply_accumulate",
                );
                return Expr::refused(span);
            }
        };
        let mut generics = self.reader().arguments(&owner.arguments).unwrap_or_default();
        if name == "multiply_accumulate" {
            // C++ deduces them from the arguments.
            generics.clear();
        } else if generics.is_empty() {
            self.errors
                .refuse(owner, format_args!("write the type of the elements: `Fragment::<f32>::{name}(..)`"));
        }
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let takes = takes.get(n).copied().unwrap_or(Takes::Any);
            let value = match taken(takes) {
                Some(ty) => self.expr(argument, Some(&ty), Stands::Beside),
                None => self.argument(argument, false).0,
            };
            arguments.push(value);
        }
        let element = match generics.first() {
            _ if name == "multiply_accumulate" => F32,
            Some(Generic::Type(ty)) => ty.clone(),
            _ => return Expr::refused(span),
        };
        let ty = Type::Fragment(Box::new(element));
        self.convergence.operation |= !matches!(name, "zero" | "filled");
        let call = Call {
            function: format!("ft_fragment_{name}"),
            context: !matches!(name, "zero" | "filled"),
            generics,
            arguments,
        };
        Expr::new(Kind::Call(call), Some(ty), span)
    }

    fn method(&mut self, call: &syn::ExprMethodCall, expected: Option<&Type>, stands: Stands) -> Expr {
        let span = call.method.span();
        let name = call.method.to_string();
        let receiver = self.expr(&call.receiver, None, Stands::Beside);
        if receiver.kind == Kind::Refused {
            return receiver;
        }
        if self.passed(&call.receiver) == Some(&Passed::Reference) {
            self.annotations.reference_receivers.extend(NodeId::of(&call.attrs));
        }
        if receiver.is_untyped() {
            self.errors.refuse(&call.receiver, "nothing gives the literal a type: add a suffix, `1u32`");
            return Expr::refused(span);
        }
        if let Some(Type::Buffer(element) | Type::Shared(element)) = receiver.ty.clone() {
            return self.memory_method(call, receiver, *element, stands);
        }
        let fragment = matches!(receiver.ty, Some(Type::Fragment(_)));
        if name == "store" && (fragment || receiver.ty.is_none()) {
            let mut arguments = vec![receiver];
            for (n, argument) in call.args.iter().enumerate() {
                let value = if n == 0 {
                    self.argument(argument, true).0
                } else {
                    self.expr(argument, Some(&U32), Stands::Beside)
                };
                arguments.push(value);
            }
            self.effect(call, stands);
            self.convergence.operation = true;
            let call = Call {
                function: "ft_fragment_store".to_string(),
                context: true,
                generics: Vec::new(),
                arguments,
            };
            return Expr::new(Kind::Call(call), None, span);
        }
        let Some(method) = intrinsics::method(&name) else {
            self.errors.refuse(&call.method, format_args!("`.{name}`: {}", intrinsics::instead_of(&name)));
            for argument in &call.args {
                if !matches!(argument, syn::Expr::Closure(_)) {
                    self.expr(argument, None, Stands::Beside);
                }
            }
            return Expr::refused(span);
        };
        if let Some(turbofish) = &call.turbofish {
            self.errors.refuse(turbofish, "leave out the types");
        }
        if name == "set_element" {
            self.effect(call, stands);
        }
        let mut arguments = Vec::new();
        for (n, argument) in call.args.iter().enumerate() {
            let wanted = match method.takes.get(n) {
                Some(Takes::Same) => receiver.ty.clone(),
                Some(takes) => taken(*takes),
                None => None,
            };
            arguments.push(self.expr(argument, wanted.as_ref(), Stands::Beside));
        }
        let same = self.same(method.takes, &mut arguments, Some(&receiver), expected, call);
        let ty = match (name.as_str(), &receiver.ty) {
            ("to_bits", Some(Type::Scalar(Scalar::F32))) => Some(U32),
            ("to_bits", Some(Type::Scalar(_))) => Some(Type::Scalar(Scalar::U16)),
            ("element", Some(Type::Fragment(element))) => Some((**element).clone()),
            _ => given(method.gives, same.as_ref(), None),
        };
        arguments.insert(0, receiver);
        let prefix = if matches!(name.as_str(), "element" | "set_element") { "ft_fragment_" } else { "ft_" };
        let call =
            Call { function: format!("{prefix}{name}"), context: false, generics: Vec::new(), arguments };
        Expr::new(Kind::Call(call), ty, span)
    }

    fn memory_method(
        &mut self,
        call: &syn::ExprMethodCall,
        memory: Expr,
        element: Type,
        stands: Stands,
    ) -> Expr {
        let span = call.method.span();
        let name = call.method.to_string();
        let generics = match &call.turbofish {
            Some(turbofish) => {
                let arguments = syn::PathArguments::AngleBracketed(turbofish.clone());
                self.reader().arguments(&arguments).unwrap_or_default()
            }
            None => Vec::new(),
        };
        let (count, store, usage) = match name.as_str() {
            "load" => (1, false, "x.load::<4>(i)"),
            "store" => (0, true, "x.store(i, [a, b])"),
            "load_as" => (2, false, "x.load_as::<u32, 4>(i)"),
            "store_as" => (2, true, "x.store_as::<u32, 4>(i, words)"),
            _ => {
                self.errors.refuse(
                    &call.method,
                    format_args!(
                        "`.{name}`: memory has load, store, load_as and store_as; {}",
                        intrinsics::instead_of(&name)
                    ),
                );
                return Expr::refused(span);
            }
        };
        let mut generics = generics;
        if generics.len() != count && !(name == "store" && generics.len() == 1) {
            self.errors.refuse(call, format_args!("write what C++ cannot infer: `{usage}`"));
            return Expr::refused(span);
        }
        let ty = match &generics[..] {
            [Generic::Const(length)] => {
                Some(Type::Array(Box::new(element.clone()), Box::new(length.clone())))
            }
            [Generic::Type(ty), Generic::Const(length)] => {
                Some(Type::Array(Box::new(ty.clone()), Box::new(length.clone())))
            }
            _ => None,
        };
        let mut arguments = vec![memory];
        for (n, argument) in call.args.iter().enumerate() {
            let wanted = match (n, &ty) {
                (1, Some(ty)) => Some(ty.clone()),
                // The length is the array's own.
                (1, None) => {
                    let any = Expr::new(Kind::Refused, None, span);
                    Some(Type::Array(Box::new(element.clone()), Box::new(any)))
                }
                _ => None,
            };
            arguments.push(self.expr(argument, wanted.as_ref(), Stands::Beside));
        }
        if store {
            self.effect(call, stands);
            // C++ takes them from the array.
            generics.clear();
        }
        let call = Call { function: format!("ft_{name}"), context: false, generics, arguments };
        Expr::new(Kind::Call(call), if store { None } else { ty }, span)
    }
}

struct Range<'e> {
    /// The expression of the loop.
    whole: &'e syn::Expr,
    start: &'e syn::Expr,
    end: &'e syn::Expr,
    inclusive: bool,
    reverse: bool,
    step: Option<&'e syn::Expr>,
}

/// Whether the value of an expression takes statements in C++.
fn needs_statements(expr: &syn::Expr) -> bool {
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

/// The value of a block that is nothing else.
fn tail(block: &syn::Block) -> Option<&syn::Expr> {
    match &block.stmts[..] {
        [syn::Stmt::Expr(value, None)] => Some(value),
        _ => None,
    }
}

/// C++ evaluates its own casts while it compiles: those of constants whose type is not known here become such.
fn plain_casts(value: &mut Expr) {
    match &mut value.kind {
        Kind::Cast(inner, _) => {
            inner.ty.get_or_insert(USIZE);
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

/// The least and the greatest value of an expression of literals without a type, and whether it and all its parts fit an i32.
fn extent(value: &Expr) -> Option<(i128, i128, bool)> {
    let is_i32 = |x: i128| i32::try_from(x).is_ok();
    let (least, greatest, narrow) = match &value.kind {
        Kind::Int { value, .. } => (i128::from(*value), i128::from(*value), true),
        Kind::Neg(operand) => {
            // The least i32 is the negative of a literal that fits no i32.
            let (least, greatest, narrow) = match &operand.kind {
                Kind::Int { value, .. } => (i128::from(*value), i128::from(*value), true),
                _ => extent(operand)?,
            };
            (-greatest, -least, narrow)
        }
        Kind::Choose(_, a, b) => {
            let (a, b) = (extent(a)?, extent(b)?);
            (a.0.min(b.0), a.1.max(b.1), a.2 && b.2)
        }
        _ => return None,
    };
    Some((least, greatest, narrow && is_i32(least) && is_i32(greatest)))
}

/// Whether a literal of an expression is negated.
fn has_sign(value: &Expr) -> bool {
    match &value.kind {
        Kind::Neg(_) => true,
        Kind::Choose(_, a, b) => has_sign(a) || has_sign(b),
        _ => false,
    }
}

/// Literals without a type, one of them negative and one too large for an i32, are i64 whatever stands beside them. C++ would take
/// digits above the greatest i32 for an unsigned number.
fn settled(mut value: Expr) -> Expr {
    let is_i64 = value.is_untyped() && has_sign(&value) && extent(&value).is_some_and(|(.., narrow)| !narrow);
    if is_i64 {
        adopt(&mut value, &I64);
    }
    value
}

/// Gives the type to literals that have none.
fn adopt(value: &mut Expr, ty: &Type) {
    match &mut value.kind {
        Kind::Int { .. } if value.ty.is_none() => value.ty = Some(ty.clone()),
        Kind::Neg(operand) if value.ty.is_none() => {
            adopt(operand, ty);
            value.ty = Some(ty.clone());
        }
        Kind::Choose(_, a, b) if value.ty.is_none() => {
            adopt(a, ty);
            adopt(b, ty);
            value.ty = Some(ty.clone());
        }
        _ => {}
    }
}

fn taken(takes: Takes) -> Option<Type> {
    match takes {
        Takes::U32 => Some(U32),
        Takes::I32 => Some(I32),
        Takes::F32 => Some(F32),
        Takes::Bool => Some(BOOL),
        _ => None,
    }
}

fn given(gives: Gives, same: Option<&Type>, element: Option<&Type>) -> Option<Type> {
    match gives {
        Gives::Same => same.cloned(),
        Gives::Unsigned => match same {
            Some(Type::Scalar(scalar)) => Some(Type::Scalar(scalar.unsigned())),
            _ => None,
        },
        Gives::U32 => Some(U32),
        Gives::I32 => Some(I32),
        Gives::F32 => Some(F32),
        Gives::Bool => Some(BOOL),
        Gives::Pair => {
            let two = Expr::new(Kind::Int { value: 2, hex: false }, None, Span::call_site());
            Some(Type::Array(Box::new(F32), Box::new(two)))
        }
        Gives::Element => element.cloned(),
        Gives::Nothing | Gives::Other => None,
    }
}

/// Whether a path begins in the standard library.
fn of_std(path: &syn::Path) -> bool {
    let first = path.segments.first().map(|segment| segment.ident.to_string());
    path.segments.len() > 1 && matches!(first.as_deref(), Some("std" | "core" | "alloc"))
}

/// Rust's names of types start with a capital and have small letters.
fn looks_like_type(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase()) && name.contains(|c: char| c.is_ascii_lowercase())
}

fn is_unroll(attribute: &syn::Attribute) -> bool {
    attribute.path().is_ident("unroll") && matches!(attribute.meta, syn::Meta::Path(_))
}

fn operator(op: &syn::BinOp) -> Option<Binary> {
    Some(match op {
        syn::BinOp::Add(_) => Binary::Add,
        syn::BinOp::Sub(_) => Binary::Sub,
        syn::BinOp::Mul(_) => Binary::Mul,
        syn::BinOp::Div(_) => Binary::Div,
        syn::BinOp::Rem(_) => Binary::Rem,
        syn::BinOp::Shl(_) => Binary::Shl,
        syn::BinOp::Shr(_) => Binary::Shr,
        syn::BinOp::BitAnd(_) => Binary::BitAnd,
        syn::BinOp::BitXor(_) => Binary::BitXor,
        syn::BinOp::BitOr(_) => Binary::BitOr,
        syn::BinOp::Eq(_) => Binary::Eq,
        syn::BinOp::Ne(_) => Binary::Ne,
        syn::BinOp::Lt(_) => Binary::Lt,
        syn::BinOp::Le(_) => Binary::Le,
        syn::BinOp::Gt(_) => Binary::Gt,
        syn::BinOp::Ge(_) => Binary::Ge,
        syn::BinOp::And(_) => Binary::And,
        syn::BinOp::Or(_) => Binary::Or,
        _ => return None,
    })
}

pub(crate) fn compound(op: &syn::BinOp) -> Option<Binary> {
    Some(match op {
        syn::BinOp::AddAssign(_) => Binary::Add,
        syn::BinOp::SubAssign(_) => Binary::Sub,
        syn::BinOp::MulAssign(_) => Binary::Mul,
        syn::BinOp::DivAssign(_) => Binary::Div,
        syn::BinOp::RemAssign(_) => Binary::Rem,
        syn::BinOp::ShlAssign(_) => Binary::Shl,
        syn::BinOp::ShrAssign(_) => Binary::Shr,
        syn::BinOp::BitAndAssign(_) => Binary::BitAnd,
        syn::BinOp::BitXorAssign(_) => Binary::BitXor,
        syn::BinOp::BitOrAssign(_) => Binary::BitOr,
        _ => return None,
    })
}
