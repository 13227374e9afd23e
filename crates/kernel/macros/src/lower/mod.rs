//! The check: from syn's tree to the tree that prints. Code without a meaning on a GPU is refused where it stands.
//!
//! [`Lower`] is the state of one function. Its methods are in the files of this folder, by what they lower:
//!
//! | file | what it lowers |
//! |---|---|
//! | `stmt`, `local`, `loops`, `place` | statements: blocks and `if`, `let`, loops, assignments and struct literals |
//! | `expr`, `literal`, `path` | expressions: operators, literals, names |
//! | `call`, `intrinsic`, `method` | calls: device functions, intrinsics, methods |
//! | `constant` | expressions that are known when an instance is compiled |
//! | `effects` | nothing: checks operands, whose order of evaluation C++ does not fix |
//! | `survey` | nothing: looks through a whole body first |

mod call;
mod constant;
mod effects;
mod expr;
mod intrinsic;
mod literal;
mod local;
mod loops;
mod method;
mod path;
mod place;
mod stmt;
mod survey;

use std::collections::{HashMap, HashSet};

use quote::ToTokens;

use crate::convergence::Convergence;
use crate::depends::Depends;
use crate::errors::Errors;
use crate::ir::{Argument, Expr, Parameter, Passed, Stmt, Type};
use crate::names::Scopes;
use crate::node::{self, NodeId};
use crate::types::Reader;

/// A function after the check.
pub(crate) struct Lowered {
    pub(crate) body: Vec<Stmt>,
    /// The threadgroup arrays, in the order of the body.
    pub(crate) shared: Vec<SharedArray>,
    pub(crate) annotations: Annotations,
    /// Convergent operations of the body.
    pub(crate) convergence: Convergence,
}

/// Facts about expressions that the native function needs.
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

/// A `let mut name: Shared<element> = shared(length)`.
pub(crate) struct SharedArray {
    pub(crate) name: String,
    pub(crate) element: Type,
    pub(crate) length: syn::Expr,
}

/// The signature of a function, against which its body is checked, and the places for errors and dependences.
pub(crate) struct Context<'a> {
    pub(crate) errors: &'a mut Errors,
    pub(crate) depends: &'a mut Depends,
    pub(crate) generics: &'a [Parameter],
    /// The Rust name of the function.
    pub(crate) name: &'a str,
    pub(crate) kernel: bool,
    pub(crate) result: Option<&'a Type>,
}

/// Checks a body, and numbers its expressions. Each argument is given with its Rust name.
pub(crate) fn body(
    context: Context<'_>,
    arguments: &mut [(String, Argument)],
    block: &mut syn::Block,
) -> Lowered {
    survey::refuse_attributes(block, context.errors);
    node::number(block);
    let mut globals = survey::globals(block);
    globals.extend(context.generics.iter().map(|parameter| parameter.name().to_string()));
    let mut lower = Lower::new(context, globals);
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
    let Lower { shared, annotations, convergence, .. } = lower;
    Lowered { body, shared, annotations, convergence }
}

/// The variable that a local name refers to.
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
    /// There is no value: the expression is a statement.
    Nothing,
    Return,
    Assign(Expr),
}

/// The state of the check of one function.
struct Lower<'a> {
    errors: &'a mut Errors,
    depends: &'a mut Depends,
    generics: &'a [Parameter],
    name: &'a str,
    kernel: bool,
    result: Option<&'a Type>,
    scopes: Scopes<Meaning>,
    /// Blocks around the current statement: 1 for the statements of the body itself.
    depth: usize,
    shared: Vec<SharedArray>,
    annotations: Annotations,
    /// Of the innermost loop, so far.
    convergence: Convergence,
}

impl<'a> Lower<'a> {
    /// The state at the start of a function, none of whose locals may have one of the names `globals`.
    fn new(context: Context<'a>, globals: HashSet<String>) -> Lower<'a> {
        let Context { errors, depends, generics, name, kernel, result } = context;
        Lower {
            errors,
            depends,
            generics,
            name,
            kernel,
            result,
            scopes: Scopes::new(globals),
            depth: 0,
            shared: Vec::new(),
            annotations: Annotations::default(),
            convergence: Convergence::default(),
        }
    }

    fn reader(&mut self) -> Reader<'_> {
        Reader { errors: self.errors, depends: self.depends, generics: self.generics }
    }

    /// Refuses an expression. The check goes on with the result in its place.
    fn refuse(&mut self, tokens: &impl ToTokens, message: impl std::fmt::Display) -> Expr {
        self.errors.refuse(tokens, message);
        Expr::invalid()
    }
}
