//! The kernels of a program: names for the host, arguments, limits, and the function constants that each reaches.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use super::constants::DeclaredConstant;
use super::declarations::{Declarations, Function};
use super::diagnostic::Checked;
use super::reader::{Attribute, Reader};
use super::words;

/// Where a parameter of a kernel gets its value from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Argument {
    /// `[[buffer(n)]]`, where the function constant of this name is true if there is one.
    Buffer { index: usize, condition: Option<String> },
    /// `[[threadgroup(n)]]`.
    Threadgroup(usize),
    /// A builtin of up to three components, by its name in the context.
    VectorBuiltin(String),
    /// A builtin of one component, by its name in the context.
    ScalarBuiltin(String),
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub(crate) struct Parameter {
    /// Empty if it has none.
    pub(crate) name: String,
    pub(crate) argument: Argument,
}

#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// Its name for the host.
    pub(crate) name: String,
    /// Its name in C++, template arguments included.
    pub(crate) call: String,
    pub(crate) parameters: Vec<Parameter>,
    /// `[[max_total_threads_per_threadgroup(n)]]`.
    pub(crate) max_threads: Option<u32>,
    /// Function constants that it reaches, by name.
    pub(crate) constants: BTreeSet<String>,
    pub(crate) line: usize,
}

/// The kernels in the order of the program, one for each instantiation of a template.
///
/// # Errors
/// For kernels that Metal refuses, and for attributes that belong to none.
pub(super) fn read(
    reader: &Reader<'_>,
    declarations: &Declarations,
    constants: &[DeclaredConstant],
) -> Checked<Vec<Kernel>> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for function in &declarations.functions {
        let max_threads = max_threads(reader, function)?;
        if !function.is_kernel {
            check_no_kernel(reader, function)?;
            continue;
        }
        let is_defined = !function.body.is_empty() || reader.is(function.body.end, "}");
        if !is_defined {
            continue;
        }
        if !function.returns_void {
            return reader.fail(function.at, format!("kernel `{}` has to return void", function.name));
        }
        let parameters = parameters(reader, function)?;
        check_conditions(reader, declarations, function, &parameters)?;
        let reached = reached_words(reader, declarations, &function.name);
        let reached: BTreeSet<String> =
            constants.iter().map(|c| c.name.clone()).filter(|name| reached.contains(name)).collect();
        for EntryPoint { name, call, at } in entry_points(reader, declarations, function)? {
            if kernels.iter().any(|kernel| kernel.name == name) {
                return reader.fail(at, format!("two kernels are called `{name}`"));
            }
            kernels.push(Kernel {
                name,
                call,
                parameters: parameters.clone(),
                max_threads,
                constants: reached.clone(),
                line: reader.line(reader.tokens[at].at),
            });
        }
    }
    check_instantiations(reader, declarations)?;
    Ok(kernels)
}

/// A kernel by the names that the host and C++ have for it.
struct EntryPoint {
    name: String,
    call: String,
    /// Its first token.
    at: usize,
}

/// The kernel itself, or the instantiations of its template.
fn entry_points(
    reader: &Reader<'_>,
    declarations: &Declarations,
    function: &Function,
) -> Checked<Vec<EntryPoint>> {
    if !function.is_template {
        let host_name = function.attributes.iter().find(|a| a.name == "host_name");
        let host_name = host_name.and_then(|a| a.argument.as_deref()).map(|name| name.trim_matches('"'));
        let name = host_name.unwrap_or(&function.name).to_owned();
        return Ok(vec![EntryPoint { name, call: function.name.clone(), at: function.at }]);
    }
    let mut found = Vec::new();
    for instantiation in declarations.instantiations.iter().filter(|i| i.template == function.name) {
        let (call, at) = (instantiation.call.clone(), instantiation.at);
        if !instantiation.is_kernel {
            return reader.fail(at, format!("the instantiation `{call}` lacks `[[kernel]]`"));
        }
        let Some(name) = instantiation.host_name.clone() else {
            return reader.fail(at, format!("the instantiation `{call}` lacks `[[host_name(\"...\")]]`"));
        };
        found.push(EntryPoint { name, call, at });
    }
    Ok(found)
}

/// The limit of a kernel's threads, if it has one; checks all attributes of the function.
fn max_threads(reader: &Reader<'_>, function: &Function) -> Checked<Option<u32>> {
    let mut max = None;
    for attribute in &function.attributes {
        let name = attribute.name.as_str();
        match name {
            "max_total_threads_per_threadgroup" => {
                // Metal takes a template parameter too, but no launch could be checked against it.
                max = attribute.number().filter(|n| (1..=1024).contains(n));
                if max.is_none() {
                    let message = "`[[max_total_threads_per_threadgroup(n)]]` needs a number from 1 to 1024";
                    return reader.fail_at(attribute, message);
                }
                if !function.is_kernel {
                    let message = format!("`[[{name}]]`: function `{}` is not a kernel", function.name);
                    return reader.fail_at(attribute, message);
                }
            }
            "kernel" | "always_inline" | "noinline" | "maybe_unused" | "unused" => {}
            "host_name" if function.is_kernel && !function.is_template => {}
            _ => {
                let message = format!("`[[{name}]]` cannot apply to function `{}`", function.name);
                return reader.fail_at(attribute, message);
            }
        }
    }
    Ok(max)
}

/// Checks that the parameters of a function that is no kernel have no attributes.
fn check_no_kernel(reader: &Reader<'_>, function: &Function) -> Checked<()> {
    let attributes = reader.attributes_in(function.parameters.start + 1, function.parameters.end);
    match attributes.first() {
        Some(attribute) => {
            let message = format!("`[[{}]]`: function `{}` is not a kernel", attribute.name, function.name);
            reader.fail_at(attribute, message)
        }
        None => Ok(()),
    }
}

/// The parameters of a kernel: each has exactly one attribute that says where its value comes from.
fn parameters(reader: &Reader<'_>, function: &Function) -> Checked<Vec<Parameter>> {
    let mut parameters: Vec<Parameter> = Vec::new();
    for (n, tokens) in reader.split(function.parameters.clone())?.into_iter().enumerate() {
        let name = tokens.clone().rev().find_map(|i| reader.word(i)).unwrap_or_default();
        let place = format!("parameter {} (`{name}`) of kernel `{}`", n + 1, function.name);
        let mut found = parameter(reader, tokens.clone())?;
        let Some(argument) = found.pop() else {
            let message = format!(
                "{place} has no attribute that says where its value comes from, such as [[buffer(0)]]"
            );
            return reader.fail(tokens.start, message);
        };
        if !found.is_empty() {
            let message = format!("{place} has two attributes that say where its value comes from");
            return reader.fail(tokens.start, message);
        }
        if parameters.iter().any(|other| is_same(&other.argument, &argument)) {
            return reader.fail(tokens.start, format!("{place} has the same attribute as another parameter"));
        }
        // The last word of a parameter without a name is no word but a `*` or a `&`.
        let last = reader.declared_name(tokens);
        // `device float (&x)[4]`.
        let name_at = if reader.is(last, ")") { last - 1 } else { last };
        let name = reader.word(name_at).unwrap_or_default().to_owned();
        parameters.push(Parameter { name, argument });
    }
    Ok(parameters)
}

/// The sources of a parameter's value that its attributes name.
fn parameter(reader: &Reader<'_>, tokens: Range<usize>) -> Checked<Vec<Argument>> {
    // Attributes stand after the name: before the comma or the bracket.
    let attributes = reader.attributes_in(tokens.start + 1, tokens.end);
    let condition =
        attributes.iter().find(|a| a.name == "function_constant").and_then(|a| a.argument.clone());
    let index = |attribute: &Attribute| match attribute.number::<usize>() {
        Some(n) if n < 31 => Ok(n),
        _ => reader.fail_at(attribute, format!("`[[{}(n)]]` needs a number from 0 to 30", attribute.name)),
    };
    let mut found = Vec::new();
    for attribute in &attributes {
        let name = attribute.name.as_str();
        match name {
            "buffer" => {
                found.push(Argument::Buffer { index: index(attribute)?, condition: condition.clone() });
            }
            "threadgroup" => found.push(Argument::Threadgroup(index(attribute)?)),
            "function_constant" | "maybe_unused" | "unused" => {}
            _ if words::VECTOR_BUILTINS.contains(&name) => found.push(Argument::VectorBuiltin(name.into())),
            _ if words::SCALAR_BUILTINS.contains(&name) => found.push(Argument::ScalarBuiltin(name.into())),
            _ => return reader.fail_at(attribute, format!("`[[{name}]]` cannot apply to a parameter")),
        }
        if attribute.argument.is_some() && !["buffer", "threadgroup", "function_constant"].contains(&name) {
            return reader.fail_at(attribute, format!("`[[{name}]]` takes no argument"));
        }
    }
    Ok(found)
}

/// Returns true if two parameters would get one value. Buffers of one index may be conditional on different
/// constants.
fn is_same(one: &Argument, other: &Argument) -> bool {
    match (one, other) {
        (Argument::Buffer { index: a, condition: p }, Argument::Buffer { index: b, condition: q }) => {
            a == b && (p.is_none() || q.is_none())
        }
        _ => one == other,
    }
}

/// Checks that buffers are conditional on constants of type bool.
fn check_conditions(
    reader: &Reader<'_>,
    declarations: &Declarations,
    function: &Function,
    parameters: &[Parameter],
) -> Checked<()> {
    for parameter in parameters {
        if let Argument::Buffer { index, condition: Some(on) } = &parameter.argument
            && !declarations.constants.iter().any(|c| c.name == *on && c.type_name == "bool")
        {
            let message =
                format!("buffer {index} of kernel `{}`: `{on}` is not a bool constant", function.name);
            return reader.fail(function.at, message);
        }
    }
    Ok(())
}

/// Checks that instantiations that say they are kernels have a kernel template.
fn check_instantiations(reader: &Reader<'_>, declarations: &Declarations) -> Checked<()> {
    for instantiation in declarations.instantiations.iter().filter(|i| i.is_kernel) {
        let template = &instantiation.template;
        if !declarations.functions.iter().any(|f| f.is_kernel && f.is_template && f.name == *template) {
            return reader.fail(instantiation.at, format!("`{template}` is not a kernel template"));
        }
    }
    Ok(())
}

/// The words of a function and of everything that it may use, by name: at least what it reaches.
fn reached_words(reader: &Reader<'_>, declarations: &Declarations, name: &str) -> HashSet<String> {
    let mut seen = HashSet::new();
    let mut open = vec![name.to_owned()];
    while let Some(name) = open.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        for function in declarations.functions.iter().filter(|f| f.name == name) {
            let tokens = function.parameters.start..function.body.end;
            open.extend(tokens.filter_map(|i| reader.word(i)).map(str::to_owned));
            let attributes = reader.attributes_in(function.parameters.start, function.parameters.end);
            open.extend(attributes.into_iter().filter_map(|attribute| attribute.argument));
        }
        for constant in declarations.constants.iter().filter(|c| c.name == name) {
            let value = constant.initializer.clone().unwrap_or(0..0);
            open.extend(value.filter_map(|i| reader.word(i)).map(str::to_owned));
        }
    }
    seen
}
