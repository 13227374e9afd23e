//! Threadgroup variables: they become references into the memory of the threadgroup, which the runner hands out.

use std::ops::Range;

use super::declarations::Function;
use super::diagnostic::Checked;
use super::edits::Edits;
use super::reader::Reader;

/// A statement that declares threadgroup variables.
struct Declaration {
    /// The statement without its `;`, from its `alignas` on if it has one.
    tokens: Range<usize>,
    /// The tokens after `threadgroup`.
    declarators: Range<usize>,
    /// The alignment that `alignas` asks for.
    alignment: Option<String>,
}

/// Rewrites the threadgroup variables of all functions; each gets a number by which the runner knows it.
///
/// # Errors
/// For variables outside of kernels and for initializers.
pub(super) fn rewrite(reader: &Reader<'_>, functions: &[Function], edits: &mut Edits) -> Checked<()> {
    let mut count = 0;
    for function in functions {
        for i in function.body.clone() {
            let Some(declaration) = declaration(reader, i, function.body.end)? else { continue };
            if !function.is_kernel {
                return reader.fail(i, "a threadgroup variable outside of a kernel: pass a pointer to it");
            }
            if reader.contains(declaration.declarators.clone(), "=") {
                return reader.fail(i, "a threadgroup variable has no initializer");
            }
            let variables = references(reader, &declaration, &mut count)?;
            // Vector types among the template arguments of the type may have been edited already.
            let statement = declaration.tokens.start..declaration.tokens.end + 1;
            edits.discard(reader, statement.clone());
            edits.replace(reader, statement, variables);
        }
    }
    Ok(())
}

/// The declaration of variables that the word at `i` makes, if it does. A pointer or a reference to threadgroup memory is an
/// ordinary variable.
fn declaration(reader: &Reader<'_>, i: usize, body_end: usize) -> Checked<Option<Declaration>> {
    if !reader.is(i, "threadgroup") {
        return Ok(None);
    }
    let aligned = alignment_before(reader, i);
    let start = aligned.as_ref().map_or(i, |aligned| aligned.start);
    if !reader.is_any(start - 1, &[";", "{", "}"]) {
        return Ok(None);
    }
    let end = reader.find(i, body_end, ";")?;
    let declared = (i..end).find(|&k| reader.is_any(k, &["=", "["])).unwrap_or(end);
    if (i..declared).any(|k| reader.is_any(k, &["*", "&"])) {
        return Ok(None);
    }
    let alignment = aligned.map(|aligned| reader.text(aligned.start + 2..aligned.end - 1));
    Ok(Some(Declaration { tokens: start..end, declarators: i + 1..end, alignment }))
}

/// The tokens of the `alignas(..)` that ends before token `i`.
fn alignment_before(reader: &Reader<'_>, i: usize) -> Option<Range<usize>> {
    if !reader.is(i.checked_sub(1)?, ")") {
        return None;
    }
    let start = (0..i).rev().find(|&n| reader.is(n, "alignas"))?;
    (reader.is(start + 1, "(") && reader.closed(start + 1).ok()? == i).then_some(start..i)
}

/// Declarations of references, one for each variable; all share the type that the first is declared with.
fn references(reader: &Reader<'_>, declaration: &Declaration, count: &mut usize) -> Checked<String> {
    let mut out = String::new();
    let mut element = String::new();
    for (n, variable) in reader.split(declaration.declarators.clone())?.into_iter().enumerate() {
        let name_at = reader.declared_name(variable.clone());
        let Some(name) = reader.word(name_at) else {
            return reader.fail(variable.start, "the threadgroup variable has no name");
        };
        if n == 0 {
            if name_at == variable.start {
                return reader.fail(variable.start, "the threadgroup variable has no type");
            }
            element = reader.text(variable.start..name_at);
        }
        let dims = reader.text(name_at + 1..variable.end);
        let natural = format!("__alignof__({element})");
        let alignment = match &declaration.alignment {
            Some(asked) => format!("(({asked}) > {natural} ? ({asked}) : {natural})"),
            None => natural,
        };
        let (pointer, reference) = if dims.is_empty() {
            (format!("threadgroup {element}*"), format!("threadgroup {element}& {name}"))
        } else {
            (format!("threadgroup {element}(*){dims}"), format!("threadgroup {element} (&{name}){dims}"))
        };
        // A record holds the size of the variable, known without a run, and its place in the code.
        out.push_str(&format!(
            "__asm__ volatile(MSL_STATIC : : \"i\"({count}), \"i\"(sizeof({element}{dims})), \"i\"({alignment})); \
             {reference} = *({pointer})msl_host_threadgroup({count}, sizeof({element}{dims}), {alignment}); "
        ));
        *count += 1;
    }
    Ok(out)
}
