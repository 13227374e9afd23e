//! Passes over a whole body, before it is lowered.

use std::collections::HashSet;

use syn::visit::{self, Visit};

use crate::errors::Errors;
use crate::names;
use crate::syntax::{is_lint, is_unroll};

/// Refuses attributes in a body: only attributes of lints, and `#[unroll]` on `for` loops, have a meaning there.
pub(super) fn refuse_attributes(block: &syn::Block, errors: &mut Errors) {
    Attributes(errors).visit_block(block);
}

/// The C++ names of the functions, structs and constants that a body mentions: no local may hide them.
pub(super) fn globals(block: &syn::Block) -> HashSet<String> {
    let mut globals = Globals::default();
    globals.visit_block(block);
    globals.0
}

struct Attributes<'a>(&'a mut Errors);

impl<'ast> Visit<'ast> for Attributes<'_> {
    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if attribute.path().is_ident("unroll") {
            self.0.refuse(attribute, "`#[unroll]` is for `for` loops");
        } else if !is_lint(attribute) {
            self.0.refuse(
                attribute,
                "the attribute would be lost: the kernel language has only `#[unroll]`, on `for`",
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
