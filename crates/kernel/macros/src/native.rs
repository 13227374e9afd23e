//! The native function, which rustc compiles and the simulator runs: the user's function, with calls of `flashtile_kernel::ops` in place
//! of its operators.
//!
//! Every call has the span of the operator that it stands for: rustc's errors point at the user's operand, and faults of the simulator
//! at the user's line. A function that the check refused has no native function.

use std::collections::HashSet;

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::visit_mut::VisitMut;

use crate::intrinsics::{self, Receiver, Takes};
use crate::ir::Binary;
use crate::lower::{Annotations, Lowered};
use crate::node::NodeId;
use crate::syntax::{compound, is_lint, module_of, shared_call, strip};

/// The body of a function, with braces.
pub(crate) fn body(block: &syn::Block, has_result: bool, lowered: &Lowered) -> TokenStream {
    let native = Native { annotations: &lowered.annotations };
    let statements = native.statements(&with_own_asserts(block), has_result);
    // In C++ a literal that wraps has another value. With the language's traits, methods of another trait with the same names are
    // ambiguous.
    quote_spanned! {block.brace_token.span.join()=> {
        #![forbid(overflowing_literals)]
        #[allow(unused_imports)]
        use ::flashtile_kernel::{intrinsics::Float as _, ops::{Elements as _, Place as _}, scalar::Element as _};
        #statements
    }}
}

/// The block with the assertions of `const` blocks as the standard library has them, which is how they are printed.
pub(crate) fn with_own_asserts(block: &syn::Block) -> syn::Block {
    struct Asserts;
    impl VisitMut for Asserts {
        fn visit_macro_mut(&mut self, mac: &mut syn::Macro) {
            if mac.path.is_ident("assert") {
                let span = mac.path.span();
                mac.path = syn::parse_quote_spanned!(span=> ::core::assert);
            }
        }
    }
    let mut block = block.clone();
    Asserts.visit_block_mut(&mut block);
    block
}

struct Native<'a> {
    annotations: &'a Annotations,
}

/// The function of `flashtile_kernel::ops` of a name.
fn operator(name: &str, span: Span) -> TokenStream {
    let name = syn::Ident::new(name, span);
    quote_spanned!(span=> ::flashtile_kernel::ops::#name)
}

/// `name();`, which reports the line of `span`.
fn operator_call(name: &str, span: Span) -> TokenStream {
    let operator = operator(name, span);
    quote_spanned!(span=> #operator();)
}

/// `name(value)`, at the place of the value.
fn checked(name: &str, value: &TokenStream) -> TokenStream {
    let span = value.span();
    let operator = operator(name, span);
    quote_spanned!(span=> #operator(#value))
}

/// The function that stands for an arithmetic operator.
fn arithmetic(op: Binary) -> Option<&'static str> {
    Some(match op {
        Binary::Add => "add",
        Binary::Sub => "sub",
        Binary::Mul => "mul",
        Binary::Div => "div",
        Binary::Rem => "rem",
        Binary::Shl => "shl",
        Binary::Shr => "shr",
        _ => return None,
    })
}

/// Returns true if an expression at the end of a function may be its value. The end of a loop or a `return`
/// is never reached.
fn has_value(expr: &syn::Expr) -> bool {
    !matches!(expr, syn::Expr::Loop(_) | syn::Expr::While(_) | syn::Expr::ForLoop(_) | syn::Expr::Return(_))
}

fn is_literal(expr: &syn::Expr) -> bool {
    match strip(expr) {
        syn::Expr::Lit(_) => true,
        syn::Expr::Unary(syn::ExprUnary { op: syn::UnOp::Neg(_), expr, .. }) => is_literal(expr),
        _ => false,
    }
}

impl Native<'_> {
    fn block(&self, block: &syn::Block) -> TokenStream {
        let statements = self.statements(block, false);
        quote_spanned!(block.brace_token.span.join()=> { #statements })
    }

    fn statements(&self, block: &syn::Block, has_result: bool) -> TokenStream {
        let mut out = TokenStream::new();
        let last = block.stmts.len().saturating_sub(1);
        for (n, stmt) in block.stmts.iter().enumerate() {
            match stmt {
                syn::Stmt::Local(local) => out.extend(self.local(local)),
                syn::Stmt::Expr(expr, None) if has_result && n == last && has_value(expr) => {
                    out.extend(checked("value", &self.expr(expr)))
                }
                syn::Stmt::Expr(expr, semi) => {
                    out.extend(self.expr(expr));
                    semi.to_tokens(&mut out);
                }
                other => other.to_tokens(&mut out),
            }
        }
        out
    }

    fn local(&self, local: &syn::Local) -> TokenStream {
        let syn::Local { attrs, let_token, pat, init, semi_token } = local;
        let Some(init) = init else { return local.to_token_stream() };
        let eq = &init.eq_token;
        let value = match shared_call(&init.expr) {
            Some(call) => self.call(call),
            None => match pat {
                syn::Pat::Wild(_) => self.expr(&init.expr),
                _ => checked("value", &self.expr(&init.expr)),
            },
        };
        quote!(#(#attrs)* #let_token #pat #eq #value #semi_token)
    }

    /// An expression that is read.
    fn expr(&self, expr: &syn::Expr) -> TokenStream {
        match expr {
            syn::Expr::Paren(inner) => self.expr(&inner.expr),
            syn::Expr::Group(inner) => self.expr(&inner.expr),
            syn::Expr::Lit(literal) => literal_of(literal),
            syn::Expr::Unary(unary) => self.unary(unary),
            syn::Expr::Binary(binary) => self.binary(binary),
            syn::Expr::Cast(cast) => self.cast(cast),
            syn::Expr::Index(index) => {
                let base = self.base(&index.expr);
                let position = self.index(&index.index);
                quote_spanned!(expr.span()=> #base.ft_get(#position))
            }
            syn::Expr::Field(field) => self.field(field, false),
            syn::Expr::Call(call) => self.call(call),
            syn::Expr::MethodCall(call) => self.method(call),
            syn::Expr::Array(array) => {
                let elements = array.elems.iter().map(|element| self.expr(element));
                quote_spanned!(array.bracket_token.span.join()=> [#(#elements),*])
            }
            syn::Expr::Repeat(repeat) => {
                let (value, length) = (self.expr(&repeat.expr), &repeat.len);
                quote_spanned!(repeat.bracket_token.span.join()=> [#value; #length])
            }
            syn::Expr::Struct(literal) => self.struct_literal(literal),
            syn::Expr::If(conditional) => self.conditional(conditional),
            syn::Expr::Block(block) => self.block(&block.block),
            syn::Expr::While(looped) => self.while_loop(looped),
            syn::Expr::Loop(looped) => self.endless_loop(looped),
            syn::Expr::ForLoop(looped) => self.for_loop(looped),
            syn::Expr::Return(exit) => {
                let value = exit.expr.as_ref().map(|value| checked("value", &self.expr(value)));
                let token = exit.return_token;
                quote!(#token #value)
            }
            syn::Expr::Assign(assign) => self.assign(&assign.left, None, &assign.right, assign.eq_token.span),
            other => other.to_token_stream(),
        }
    }

    fn cast(&self, cast: &syn::ExprCast) -> TokenStream {
        let (value, ty) = (self.expr(&cast.expr), &cast.ty);
        // A literal takes the type it is converted to.
        let value = if is_literal(&cast.expr) { value } else { checked("scalar", &value) };
        quote_spanned!(cast.as_token.span=> (#value as #ty))
    }

    fn struct_literal(&self, literal: &syn::ExprStruct) -> TokenStream {
        let path = &literal.path;
        let fields = literal.fields.iter().map(|field| {
            let (member, value) = (&field.member, checked("value", &self.expr(&field.expr)));
            quote!(#member: #value)
        });
        quote!(#path { #(#fields),* })
    }

    fn conditional(&self, conditional: &syn::ExprIf) -> TokenStream {
        let condition = self.condition(&conditional.cond);
        let then = self.block(&conditional.then_branch);
        let otherwise = conditional.else_branch.as_ref().map(|(token, branch)| {
            let branch = self.expr(branch);
            quote!(#token #branch)
        });
        let token = conditional.if_token;
        let value = quote!(#token #condition #then #otherwise);
        if is_in(&self.annotations.beside_literals, NodeId::of(&conditional.attrs)) {
            checked("beside_literal", &value)
        } else {
            value
        }
    }

    fn while_loop(&self, looped: &syn::ExprWhile) -> TokenStream {
        let (attrs, token) = (lints(&looped.attrs), looped.while_token);
        let condition = self.condition(&looped.cond);
        let count = operator_call("count_iteration", token.span);
        let body = self.statements(&looped.body, false);
        self.looped(
            &looped.attrs,
            token.span,
            |iteration| quote!(#attrs #token #condition { #iteration #count #body }),
        )
    }

    fn endless_loop(&self, looped: &syn::ExprLoop) -> TokenStream {
        let (attrs, token) = (lints(&looped.attrs), looped.loop_token);
        let count = operator_call("count_iteration", token.span);
        let body = self.statements(&looped.body, false);
        self.looped(&looped.attrs, token.span, |iteration| quote!(#attrs #token { #iteration #count #body }))
    }

    fn for_loop(&self, looped: &syn::ExprForLoop) -> TokenStream {
        let syn::ExprForLoop { for_token, pat, in_token, body, .. } = looped;
        let (attrs, range) = (lints(&looped.attrs), self.range(&looped.expr));
        let statements = self.statements(body, false);
        self.looped(&looped.attrs, for_token.span, |iteration| {
            let body = quote_spanned!(body.brace_token.span.join()=> { #iteration #statements });
            quote!(#attrs #for_token #pat #in_token #range #body)
        })
    }

    /// A loop. `written` puts the tokens that it is given at the head of the body: they record iterations, where the loop may have
    /// convergent operations.
    fn looped(
        &self,
        attributes: &[syn::Attribute],
        span: Span,
        written: impl FnOnce(Option<TokenStream>) -> TokenStream,
    ) -> TokenStream {
        let convergence = NodeId::of(attributes).and_then(|id| self.annotations.loops.get(&id));
        let Some(convergence) = convergence.filter(|convergence| convergence.is_possible()) else {
            return written(None);
        };
        let is_convergent = convergence.is_convergent(Clone::clone);
        let (enter, iter, leave) =
            (operator("scope_enter", span), operator("loop_iter", span), operator("scope_leave", span));
        let ft_entered = syn::Ident::new("ft_entered", span);
        let looped = written(Some(quote_spanned!(span=> #iter(#is_convergent);)));
        // A `loop` may have no end but `return`.
        quote_spanned!(span=> {
            #[allow(unused_variables)]
            let #ft_entered = #enter(0, #is_convergent);
            #looped
            #[allow(unreachable_code)]
            #leave(#ft_entered, #is_convergent);
        })
    }

    fn condition(&self, expr: &syn::Expr) -> TokenStream {
        checked("condition", &self.expr(expr))
    }

    /// An index of memory. A literal without suffix gets one: several types index memory, and rustc would not choose.
    fn index(&self, expr: &syn::Expr) -> TokenStream {
        match strip(expr) {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(int), .. }) if int.suffix().is_empty() => {
                syn::LitInt::new(&format!("{}u64", int.base10_digits()), int.span()).to_token_stream()
            }
            other => self.expr(other),
        }
    }

    /// The place that an element or a field is read from.
    fn base(&self, expr: &syn::Expr) -> TokenStream {
        match strip(expr) {
            syn::Expr::Index(index) => {
                let (base, position) = (self.base(&index.expr), self.index(&index.index));
                quote_spanned!(expr.span()=> #base.ft_at(#position))
            }
            syn::Expr::Field(field) => self.field(field, false),
            plain @ (syn::Expr::Path(_) | syn::Expr::MethodCall(_) | syn::Expr::Call(_)) => self.expr(plain),
            other => {
                let value = self.expr(other);
                quote_spanned!(expr.span()=> (#value))
            }
        }
    }

    /// The place that an element or a field is written to.
    fn base_mut(&self, expr: &syn::Expr) -> TokenStream {
        match strip(expr) {
            syn::Expr::Index(index) => {
                let (base, position) = (self.base_mut(&index.expr), self.index(&index.index));
                quote_spanned!(expr.span()=> #base.ft_at_mut(#position))
            }
            syn::Expr::Field(field) => self.field(field, true),
            _ => self.base(expr),
        }
    }

    fn field(&self, field: &syn::ExprField, mutable: bool) -> TokenStream {
        let base = if mutable { self.base_mut(&field.base) } else { self.base(&field.base) };
        let member = &field.member;
        quote_spanned!(field.dot_token.span()=> #base.#member)
    }

    fn unary(&self, unary: &syn::ExprUnary) -> TokenStream {
        let value = self.expr(&unary.expr);
        let op = &unary.op;
        match op {
            syn::UnOp::Neg(token) if !is_literal(&unary.expr) => {
                let operator = operator("neg", token.span());
                quote_spanned!(token.span()=> #operator(#value))
            }
            syn::UnOp::Not(_) => {
                let value = checked("bits", &value);
                quote!(#op #value)
            }
            syn::UnOp::Deref(_) => quote!((#op #value)),
            _ => quote!(#op #value),
        }
    }

    fn binary(&self, binary: &syn::ExprBinary) -> TokenStream {
        let span = binary.op.span();
        if let Some(op) = compound(&binary.op) {
            return self.assign(&binary.left, Some(op), &binary.right, span);
        }
        let (left, op, right) = (self.expr(&binary.left), &binary.op, self.expr(&binary.right));
        let around = match op {
            syn::BinOp::Add(_) => return operation("add", span, &left, &right),
            syn::BinOp::Sub(_) => return operation("sub", span, &left, &right),
            syn::BinOp::Mul(_) => return operation("mul", span, &left, &right),
            syn::BinOp::Div(_) => return operation("div", span, &left, &right),
            syn::BinOp::Rem(_) => return operation("rem", span, &left, &right),
            syn::BinOp::Shl(_) => return operation("shl", span, &left, &right),
            syn::BinOp::Shr(_) => return operation("shr", span, &left, &right),
            syn::BinOp::And(_) | syn::BinOp::Or(_) => "condition",
            syn::BinOp::Eq(_) | syn::BinOp::Ne(_) => "equatable",
            syn::BinOp::BitAnd(_) | syn::BinOp::BitOr(_) | syn::BinOp::BitXor(_) => {
                // Of two bools C++ makes an int, which the printer casts only where it knows that they are bools.
                if is_in(&self.annotations.bool_operators, NodeId::of_operator(binary)) {
                    "bits"
                } else {
                    "integer"
                }
            }
            _ => "number",
        };
        let (left, right) = (checked(around, &left), checked(around, &right));
        quote_spanned!(span=> (#left #op #right))
    }

    fn range(&self, expr: &syn::Expr) -> TokenStream {
        match strip(expr) {
            syn::Expr::Range(range) => {
                let bound = |end: &Option<Box<syn::Expr>>| {
                    end.as_ref().map(|end| checked("integer", &self.expr(end)))
                };
                let (start, limits, end) = (bound(&range.start), &range.limits, bound(&range.end));
                quote!((#start #limits #end))
            }
            syn::Expr::MethodCall(call) => {
                let (range, method) = (self.range(&call.receiver), &call.method);
                let arguments = call.args.iter().map(|argument| self.expr(argument));
                quote_spanned!(call.method.span()=> #range.#method(#(#arguments),*))
            }
            other => other.to_token_stream(),
        }
    }

    fn assign(&self, left: &syn::Expr, op: Option<Binary>, right: &syn::Expr, span: Span) -> TokenStream {
        // All uses have one span: hygiene finds a name only in the span that declared it.
        let (ft_value, ft_index) = (syn::Ident::new("ft_value", span), syn::Ident::new("ft_index", span));
        let value = checked("value", &self.expr(right));
        let value = if op.is_some_and(Binary::is_shift) { self.expr(right) } else { value };
        let combined = |old: TokenStream| match op {
            None => quote!(#ft_value),
            Some(op) => match arithmetic(op) {
                Some(name) => operation(name, span, &old, &quote!(#ft_value)),
                None => {
                    let (old, new) =
                        (checked("bits", &old), quote!(::flashtile_kernel::ops::bits(#ft_value)));
                    let sign: TokenStream = op.sign().parse().unwrap_or_default();
                    quote_spanned!(span=> #old #sign #new)
                }
            },
        };
        match strip(left) {
            syn::Expr::Index(index) => {
                let (base, position) = (self.base_mut(&index.expr), self.index(&index.index));
                let combined = combined(quote_spanned!(span=> #base.ft_get(#ft_index)));
                quote_spanned!(left.span()=> {
                    let #ft_value = #value;
                    let #ft_index = #position;
                    let #ft_value = #combined;
                    #base.ft_set(#ft_index, #ft_value)
                })
            }
            other => {
                let place = match other {
                    syn::Expr::Field(field) => self.field(field, true),
                    syn::Expr::Unary(deref) => {
                        let (op, inner) = (&deref.op, &deref.expr);
                        quote!(#op #inner)
                    }
                    plain => plain.to_token_stream(),
                };
                match op {
                    None => quote_spanned!(span=> #place = #value),
                    Some(_) => {
                        let combined = combined(self.expr(other));
                        quote_spanned!(span=> { let #ft_value = #value; #place = #combined })
                    }
                }
            }
        }
    }

    fn call(&self, call: &syn::ExprCall) -> TokenStream {
        let span = call.func.span();
        let mut function = call.func.to_token_stream();
        let mut index = None;
        if let syn::Expr::Path(path) = strip(&call.func)
            && let (1, Some(segment)) = (path.path.segments.len(), path.path.segments.last())
        {
            let name = segment.ident.to_string();
            let intrinsic = intrinsics::function(&name);
            if intrinsic.is_some() || name == "shared" {
                function = quote_spanned!(span=> ::flashtile_kernel::intrinsics::#segment);
            }
            index =
                intrinsic.and_then(|function| function.takes.iter().position(|takes| *takes == Takes::Index));
        }
        let arguments = call.args.iter().enumerate().map(|(n, argument)| match Some(n) == index {
            true => self.index(argument),
            false => self.argument(argument),
        });
        let called = quote_spanned!(span=> #function(#(#arguments),*));
        let id = NodeId::of(&call.attrs).filter(|id| self.annotations.device_calls.contains(id));
        match (id, strip(&call.func)) {
            (Some(NodeId(number)), syn::Expr::Path(path)) => {
                let (enter, returned, module) =
                    (operator("scope_enter", span), operator("scope_return", span), module_of(&path.path));
                let is_convergent = quote_spanned!(span=> #module::IS_CONVERGENT);
                quote_spanned!(span=> #returned(#enter(#number, #is_convergent), #called, #is_convergent))
            }
            _ => called,
        }
    }

    fn argument(&self, argument: &syn::Expr) -> TokenStream {
        match strip(argument) {
            // A variable holds a value that was checked, or is memory.
            plain @ syn::Expr::Path(_) => plain.to_token_stream(),
            syn::Expr::Reference(reference) => match strip(&reference.expr) {
                element @ syn::Expr::Index(_) => self.base(element),
                field @ syn::Expr::Field(_) => {
                    let (and, mutability) = (reference.and_token, reference.mutability);
                    let field = if mutability.is_some() { self.base_mut(field) } else { self.base(field) };
                    quote!(#and #mutability #field)
                }
                _ => reference.to_token_stream(),
            },
            other => checked("value", &self.expr(other)),
        }
    }

    fn method(&self, call: &syn::ExprMethodCall) -> TokenStream {
        let span = call.method.span();
        let (method, turbofish) = (&call.method, &call.turbofish);
        let name = method.to_string();
        let is_memory = intrinsics::memory_method(&name).is_some();
        let arguments = call.args.iter().enumerate().map(|(n, argument)| {
            if is_memory && n == 0 && is_literal(argument) {
                self.index(argument)
            } else {
                self.argument(argument)
            }
        });
        let receiver = match intrinsics::method(&name).map(|method| method.receiver) {
            // Memory, and fragments that are stored.
            None | Some(Receiver::Fragment) => self.base(&call.receiver),
            Some(Receiver::FragmentMut) => self.base_mut(&call.receiver),
            Some(Receiver::Number) => self.receiver("number", call),
            Some(Receiver::Integer) => self.receiver("integer", call),
            Some(Receiver::Float) if intrinsics::is_exponential(&name) => self.receiver("exponent", call),
            Some(Receiver::Float) => self.receiver("float", call),
            Some(Receiver::Scalar) => self.receiver("scalar", call),
            Some(Receiver::Element) => self.receiver("element", call),
        };
        quote_spanned!(span=> #receiver.#method #turbofish(#(#arguments),*))
    }
}

impl Native<'_> {
    /// The receiver of a method of numbers. A `&mut` parameter is dereferenced, as Rust does for the user's own call.
    fn receiver(&self, name: &str, call: &syn::ExprMethodCall) -> TokenStream {
        let value = self.expr(&call.receiver);
        if is_in(&self.annotations.reference_receivers, NodeId::of(&call.attrs)) {
            checked(name, &quote_spanned!(value.span()=> *#value))
        } else {
            checked(name, &value)
        }
    }
}

/// Returns true if an expression has a number, and the number is one of `nodes`.
fn is_in(nodes: &HashSet<NodeId>, id: Option<NodeId>) -> bool {
    id.is_some_and(|id| nodes.contains(&id))
}

fn operation(name: &str, span: Span, left: &TokenStream, right: &TokenStream) -> TokenStream {
    let operator = operator(name, span);
    quote_spanned!(span=> #operator(#left, #right))
}

/// Float literals are f32, where rustc would take f64 if nothing said otherwise.
fn literal_of(literal: &syn::ExprLit) -> TokenStream {
    match &literal.lit {
        syn::Lit::Float(float) if float.suffix().is_empty() => {
            let digits = float.base10_digits();
            let digits = digits.strip_suffix('.').unwrap_or(digits);
            syn::LitFloat::new(&format!("{digits}f32"), float.span()).to_token_stream()
        }
        other => other.to_token_stream(),
    }
}

/// The attributes that rustc reads.
fn lints(attributes: &[syn::Attribute]) -> TokenStream {
    attributes.iter().filter(|attribute| is_lint(attribute)).map(ToTokens::to_token_stream).collect()
}
