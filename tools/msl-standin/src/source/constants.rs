//! Constants at program scope, function constants among them.

use std::collections::HashMap;

use super::declarations::{Declarations, ProgramConstant};
use super::diagnostic::Checked;
use super::edits::Edits;
use super::reader::Reader;
use super::words;

/// A function constant as the program declares it; its value is set when a kernel is made.
#[derive(Clone, Debug)]
pub(crate) struct DeclaredConstant {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) type_name: String,
    /// The program asks whether it is set, so that it need not be.
    pub(crate) is_optional: bool,
}

/// How a constant is declared to clang, and what its uses become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConstantKind {
    /// `[[function_constant(n)]]`: a variable that the runner sets.
    Function { index: u32 },
    /// A constant computed from function constants: a function, which its uses call.
    Derived,
    /// An array, a vector or a struct: global memory, which its uses see as constant memory.
    Table,
    /// A scalar whose value the compiler knows.
    Scalar,
}

type Kinds<'a> = HashMap<&'a str, (ConstantKind, &'a ProgramConstant)>;

/// Rewrites constants and their uses; the function constants in the order of the program.
///
/// # Errors
/// For function constants that are no scalars or share an index, for tables computed from them, and for locals that
/// hide a constant whose uses have to be rewritten.
pub(super) fn rewrite(
    reader: &Reader<'_>,
    declarations: &Declarations,
    edits: &mut Edits,
) -> Checked<Vec<DeclaredConstant>> {
    let kinds = kinds(reader, declarations);
    let mut declared: Vec<DeclaredConstant> = Vec::new();
    for constant in &declarations.constants {
        match kinds[constant.name.as_str()].0 {
            ConstantKind::Function { index } => {
                if declared.iter().any(|other| other.index == index) {
                    let message = format!("function constant {index} is declared twice");
                    return reader.fail(constant.tokens.start, message);
                }
                declared.push(function_constant(reader, constant, index, edits)?);
            }
            ConstantKind::Derived => derived(reader, constant, edits)?,
            ConstantKind::Table | ConstantKind::Scalar => in_global_memory(reader, constant, edits),
        }
    }
    uses(reader, &kinds, &mut declared, edits)?;
    Ok(declared)
}

/// The kind of each constant. A constant can depend only on constants before it.
fn kinds<'a>(reader: &Reader<'_>, declarations: &'a Declarations) -> Kinds<'a> {
    let mut kinds = Kinds::new();
    for constant in &declarations.constants {
        let is_late = |word: &str| {
            kinds.get(word).is_some_and(|(kind, _)| {
                matches!(kind, ConstantKind::Function { .. } | ConstantKind::Derived)
            })
        };
        let mut value = constant.initializer.clone().unwrap_or(0..0);
        let kind = match constant.index {
            Some(index) => ConstantKind::Function { index },
            None if value.any(|i| reader.word(i).is_some_and(is_late)) => ConstantKind::Derived,
            None if constant.is_array => ConstantKind::Table,
            None if !words::is_scalar(&constant.type_name) && !constant.is_constexpr => ConstantKind::Table,
            None => ConstantKind::Scalar,
        };
        kinds.insert(&constant.name, (kind, constant));
    }
    kinds
}

/// Declares a function constant: a variable of the entry points' object file, and whether it is set.
fn function_constant(
    reader: &Reader<'_>,
    constant: &ProgramConstant,
    index: u32,
    edits: &mut Edits,
) -> Checked<DeclaredConstant> {
    let ProgramConstant { name, type_name, .. } = constant;
    if constant.is_array || !words::FUNCTION_CONSTANT_TYPES.contains(&type_name.as_str()) {
        return reader.fail(constant.tokens.start, format!("function constant `{name}` must be a scalar"));
    }
    let declaration = format!(
        "extern \"C\" {{ extern const __global {type_name} {name} __asm__(\"msl_fc_{index}\"); \
         extern const __global bool msl_is_set_{name} __asm__(\"msl_fcd_{index}\"); }}",
    );
    edits.replace(reader, constant.tokens.clone(), declaration);
    Ok(DeclaredConstant { name: name.clone(), index, type_name: type_name.clone(), is_optional: false })
}

/// Makes a constant a function that computes it where it is used.
fn derived(reader: &Reader<'_>, constant: &ProgramConstant, edits: &mut Edits) -> Checked<()> {
    let ProgramConstant { name, type_name, tokens, .. } = constant;
    if constant.is_array {
        return reader.fail(tokens.start, format!("table `{name}` depends on a function constant"));
    }
    edits.replace(reader, constant.declarator(), format!("METAL_FUNC {type_name} {name}() {{ return ("));
    edits.replace(reader, tokens.end - 1..tokens.end, "); }");
    Ok(())
}

fn in_global_memory(reader: &Reader<'_>, constant: &ProgramConstant, edits: &mut Edits) {
    for i in constant.declarator() {
        if reader.is(i, "constant") {
            edits.replace(reader, i..i + 1, "static const __global");
        } else if reader.is(i, "static") {
            edits.replace(reader, i..i + 1, "");
        }
    }
}

/// Rewrites the uses of constants.
fn uses(
    reader: &Reader<'_>,
    kinds: &Kinds<'_>,
    declared: &mut [DeclaredConstant],
    edits: &mut Edits,
) -> Checked<()> {
    let mut i = 0;
    while i < reader.tokens.len() {
        let word = reader.word(i);
        if word == Some("is_function_constant_defined") {
            is_defined(reader, i, declared, edits)?;
            i += 4;
            continue;
        }
        if let Some((word, &(kind, constant))) = word.and_then(|word| Some((word, kinds.get(word)?))) {
            let is_own_name = constant.declarator().contains(&i);
            let call = match kind {
                ConstantKind::Function { .. } | ConstantKind::Scalar => None,
                ConstantKind::Derived => Some(format!("{word}()")),
                ConstantKind::Table => Some(format!("metal::msl_constant({word})")),
            };
            if let Some(call) = call.filter(|_| !is_own_name) {
                if declares_local(reader, i) {
                    return reader.fail(i, format!("`{word}` hides the constant at program scope"));
                }
                let is_member = i > 0 && reader.is_any(i - 1, &[".", "->", "::"]);
                if !is_member && i > constant.tokens.start {
                    edits.replace(reader, i..i + 1, call);
                }
            }
        }
        i += 1;
    }
    Ok(())
}

/// `is_function_constant_defined(name)`, whose word is token `i`.
fn is_defined(
    reader: &Reader<'_>,
    i: usize,
    declared: &mut [DeclaredConstant],
    edits: &mut Edits,
) -> Checked<()> {
    let Some(name) = reader.word(i + 2).filter(|_| reader.is(i + 1, "(") && reader.is(i + 3, ")")) else {
        return reader.fail(i, "is_function_constant_defined needs the name of a function constant");
    };
    let Some(constant) = declared.iter_mut().find(|constant| constant.name == name) else {
        return reader.fail(i, format!("`{name}` is not a function constant"));
    };
    constant.is_optional = true;
    edits.replace(reader, i..i + 4, format!("msl_is_set_{name}"));
    Ok(())
}

/// Returns true if the name at `i` is declared there, as a parameter or a local is: it follows a type.
fn declares_local(reader: &Reader<'_>, i: usize) -> bool {
    let Some(before) = i.checked_sub(1) else { return false };
    let is_type =
        |k: usize| reader.word(k).is_some_and(|word| words::is_scalar(word) || words::is_vector(word));
    let is_scalar = |k: usize| reader.word(k).is_some_and(words::is_scalar);
    is_type(before) || (before > 0 && reader.is_any(before, &["*", "&"]) && is_scalar(before - 1))
}
