//! Numbers of expressions. The check keeps what it finds out about an expression by its number, and the native function looks it up:
//! a number is an attribute in the tree itself, so that a clone of the tree has the same numbers.
//!
//! The attributes are inner ones, which syn prints in the bodies of loops alone: errors still point at the tokens that the user wrote.

use proc_macro2::Span;
use quote::{ToTokens, quote};
use syn::visit_mut::{self, VisitMut};

/// The attribute that holds a number. No attribute of the language has this name: it is refused where a user writes it.
const ATTRIBUTE: &str = "ft_node";

/// The number of an expression in its function, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct NodeId(pub(crate) u64);

impl NodeId {
    /// The number of a call, a method call, an `if` or a loop, from its attributes. An expression in a type, a pattern or a generic
    /// argument has none: rustc reads it as written.
    pub(crate) fn of(attributes: &[syn::Attribute]) -> Option<NodeId> {
        attributes.iter().find_map(|attribute| match &attribute.meta {
            syn::Meta::NameValue(meta) if meta.path.is_ident(ATTRIBUTE) => match &meta.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Int(number), .. }) => {
                    number.base10_parse().ok().map(NodeId)
                }
                _ => None,
            },
            _ => None,
        })
    }

    /// The number of `&`, `|` or `^`.
    pub(crate) fn of_operator(binary: &syn::ExprBinary) -> Option<NodeId> {
        match &*binary.right {
            syn::Expr::Paren(right) => NodeId::of(&right.attrs),
            _ => None,
        }
    }
}

/// Numbers the bit operators, calls, `if`s and loops of a body.
pub(crate) fn number(block: &mut syn::Block) {
    Numbers { last: 0 }.visit_block_mut(block);
}

struct Numbers {
    last: u64,
}

impl Numbers {
    fn next(&mut self) -> Option<syn::Attribute> {
        self.last += 1;
        let name = syn::Ident::new(ATTRIBUTE, Span::call_site());
        let number = proc_macro2::Literal::u64_unsuffixed(self.last);
        let meta = syn::parse2(quote!(#name = #number)).ok()?;
        Some(syn::Attribute {
            pound_token: <syn::Token![#]>::default(),
            style: syn::AttrStyle::Inner(<syn::Token![!]>::default()),
            bracket_token: syn::token::Bracket::default(),
            meta,
        })
    }

    /// Numbers an operator, on parentheses around its right operand: syn prints an operator with attributes in parentheses at the
    /// place of the macro. These are at the operand's last token.
    fn operator(&mut self, binary: &mut syn::ExprBinary) {
        if !matches!(*binary.right, syn::Expr::Paren(_)) {
            let end = binary.right.to_token_stream().into_iter().last();
            let paren_token = syn::token::Paren(end.map_or_else(Span::call_site, |token| token.span()));
            let infer = syn::ExprInfer { attrs: Vec::new(), underscore_token: <syn::Token![_]>::default() };
            let expr = Box::new(std::mem::replace(&mut *binary.right, syn::Expr::Infer(infer)));
            *binary.right = syn::Expr::Paren(syn::ExprParen { attrs: Vec::new(), paren_token, expr });
        }
        if let syn::Expr::Paren(right) = &mut *binary.right {
            right.attrs.extend(self.next());
        }
    }
}

impl VisitMut for Numbers {
    fn visit_expr_mut(&mut self, expr: &mut syn::Expr) {
        match expr {
            syn::Expr::Binary(binary) => {
                if matches!(binary.op, syn::BinOp::BitAnd(_) | syn::BinOp::BitOr(_) | syn::BinOp::BitXor(_)) {
                    self.operator(binary);
                }
            }
            syn::Expr::Call(call) => call.attrs.extend(self.next()),
            syn::Expr::MethodCall(call) => call.attrs.extend(self.next()),
            syn::Expr::If(conditional) => conditional.attrs.extend(self.next()),
            syn::Expr::While(looped) => looped.attrs.extend(self.next()),
            syn::Expr::Loop(looped) => looped.attrs.extend(self.next()),
            syn::Expr::ForLoop(looped) => looped.attrs.extend(self.next()),
            _ => {}
        }
        visit_mut::visit_expr_mut(self, expr);
    }

    fn visit_expr_repeat_mut(&mut self, repeat: &mut syn::ExprRepeat) {
        self.visit_expr_mut(&mut repeat.expr);
    }

    // rustc reads these as written.
    fn visit_type_mut(&mut self, _: &mut syn::Type) {}
    fn visit_pat_mut(&mut self, _: &mut syn::Pat) {}
    fn visit_path_mut(&mut self, _: &mut syn::Path) {}
    fn visit_angle_bracketed_generic_arguments_mut(&mut self, _: &mut syn::AngleBracketedGenericArguments) {}
    fn visit_expr_const_mut(&mut self, _: &mut syn::ExprConst) {}
    fn visit_item_mut(&mut self, _: &mut syn::Item) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::spanned::Spanned;

    /// The value of a `let`.
    fn value(block: &syn::Block) -> syn::Expr {
        let syn::Stmt::Local(local) = &block.stmts[0] else { panic!() };
        (*local.init.as_ref().unwrap().expr).clone()
    }

    #[test]
    fn clones_keep_numbers() {
        let mut block = syn::parse_str("{ let x: [bool; 1 | 2] = f(a & b, [0; 3 ^ 4]).g(); }").unwrap();
        number(&mut block);
        let syn::Expr::MethodCall(method) = value(&block.clone()) else { panic!() };
        assert_eq!(NodeId::of(&method.attrs), Some(NodeId(1)));
        let syn::Expr::Call(call) = *method.receiver else { panic!() };
        assert_eq!(NodeId::of(&call.attrs), Some(NodeId(2)));
        let syn::Expr::Binary(and) = &call.args[0] else { panic!() };
        assert_eq!(NodeId::of_operator(and), Some(NodeId(3)));
        // The length of an array has none.
        let syn::Expr::Repeat(repeat) = &call.args[1] else { panic!() };
        let syn::Expr::Binary(length) = &*repeat.len else { panic!() };
        assert_eq!(NodeId::of_operator(length), None);
    }

    #[test]
    fn expressions_stay_where_they_are() {
        for source in ["a & b.c", "if a { b } else { c | d }", "f(x) ^ g(y)", "x.f(1)", "1 | 2 | (3)"] {
            let mut block = syn::parse_str(&format!("{{ let x = {source}; }}")).unwrap();
            let place = |block: &syn::Block| (value(block).span().start(), value(block).span().end());
            let written = place(&block);
            number(&mut block);
            assert_eq!(place(&block), written, "{source}");
        }
    }
}
