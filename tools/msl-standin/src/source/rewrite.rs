//! Rewrites that make words of Metal mean the same to clang.

use super::declarations::Declarations;
use super::diagnostic::Checked;
use super::edits::Edits;
use super::lex::TokenKind;
use super::reader::Reader;
use super::words;

/// Renames what OpenCL reserves, and gives `bfloat` its literals.
pub(super) fn tokens(reader: &Reader<'_>, edits: &mut Edits) {
    for (i, token) in reader.tokens.iter().enumerate() {
        match token.kind {
            TokenKind::Word => {
                let is_variable = token.text == "private" && !reader.is(i + 1, ":");
                if words::is_opencl(token.text) || is_variable {
                    edits.replace(reader, i..i + 1, format!("user_{}", token.text));
                }
            }
            TokenKind::Number => {
                let lower = token.text.to_ascii_lowercase();
                // In a hexadecimal integer `bf` are digits.
                let is_integer = lower.starts_with("0x") && !lower.contains('p');
                if let Some(digits) = lower.strip_suffix("bf").filter(|_| !is_integer) {
                    edits.replace(reader, i..i + 1, format!("((bfloat){digits}f)"));
                }
            }
            TokenKind::Directive => {
                let pragma = token.text[1..].trim_start().strip_prefix("pragma").map_or("", str::trim_start);
                if pragma.starts_with("METAL") {
                    edits.replace(reader, i..i + 1, "");
                }
            }
            TokenKind::Literal | TokenKind::Punctuation => {}
        }
    }
}

/// `float4(...)` and `vec<T, 4>(...)` become calls of a function, since `(float4)x` would reinterpret bits.
pub(super) fn constructors(reader: &Reader<'_>, edits: &mut Edits) {
    for i in 0..reader.tokens.len() {
        let Some(word) = reader.word(i).filter(|&word| words::is_vector(word) || word == "vec") else {
            continue;
        };
        let has_arguments = word == "vec" && reader.is(i + 1, "<");
        let after = if has_arguments { reader.angle_closed(i + 1) } else { Some(i + 1) };
        if let Some(after) = after.filter(|&after| reader.is(after, "(") && !reader.is_member(i)) {
            let is_qualified = i >= 2 && reader.is(i - 1, "::") && reader.is(i - 2, "metal");
            let namespace = if is_qualified { "" } else { "metal::" };
            edits.insert_before(reader, i, &format!("{namespace}msl_make<metal::"));
            edits.insert_before(reader, after, ">");
        }
    }
}

/// Constant members of types: `static constant` variables, and functions of objects in constant memory.
pub(super) fn constant_members(
    reader: &Reader<'_>,
    declarations: &Declarations,
    edits: &mut Edits,
) -> Checked<()> {
    for body in &declarations.type_bodies {
        for i in body.clone().filter(|&i| reader.is(i, "constant")) {
            if reader.contains(i.saturating_sub(3)..i + 3, "static") {
                edits.replace(reader, i..i + 1, "const __global");
            }
            if qualifies_function(reader, i) {
                constant_function(reader, i, edits)?;
            }
        }
    }
    Ok(())
}

/// Returns true if the address space at `i` stands behind the parameters of a member function.
fn qualifies_function(reader: &Reader<'_>, i: usize) -> bool {
    let before = if reader.is(i - 1, "const") { i - 2 } else { i - 1 };
    let after = if reader.is(i + 1, "const") { i + 2 } else { i + 1 };
    reader.is(before, ")") && reader.is_any(after, &["{", ";"])
}

/// A member function cannot be qualified with OpenCL's constant address space, so that all of the function uses the
/// global one, which contains it.
fn constant_function(reader: &Reader<'_>, qualifier: usize, edits: &mut Edits) -> Checked<()> {
    let body = if reader.is(qualifier + 1, "const") { qualifier + 2 } else { qualifier + 1 };
    let end = if reader.is(body, "{") { reader.closed(body)? } else { body };
    let before = (0..qualifier).rev().find(|&i| reader.is_any(i, &[";", "{", "}", ":"]));
    for i in before.map_or(0, |i| i + 1)..end {
        if reader.is(i, "constant") {
            edits.replace(reader, i..i + 1, "const __global");
        }
    }
    Ok(())
}
