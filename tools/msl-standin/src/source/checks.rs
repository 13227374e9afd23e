//! Programs that Metal refuses, and that clang, which reads them as C++ for OpenCL, would accept.

use std::collections::HashSet;

use super::declarations::{Declarations, Function};
use super::diagnostic::Checked;
use super::lex::{Token, TokenKind};
use super::reader::Reader;
use super::words;

/// Checks each token by itself, before attributes are removed.
pub(super) fn tokens(reader: &Reader<'_>) -> Checked<()> {
    for (i, token) in reader.tokens.iter().enumerate() {
        let wrong = match token.kind {
            TokenKind::Word => word(reader, i, token.text),
            TokenKind::Number => number(token.text),
            TokenKind::Literal => literal(reader, i, token),
            TokenKind::Punctuation => lambda(reader, i),
            TokenKind::Directive => directive(token.text),
        };
        if let Some(message) = wrong {
            return reader.fail(i, message);
        }
    }
    Ok(())
}

fn word(reader: &Reader<'_>, i: usize, word: &str) -> Option<String> {
    if let Some(why) = words::banned(word) {
        return Some(format!("`{word}`: {why}"));
    }
    if word == "std" && reader.is(i + 1, "::") {
        return Some("`std::`: Metal has no C++ standard library".into());
    }
    if word == "long" && reader.is(i + 1, "long") {
        return Some("`long long`: Metal has no such type, and long has 64 bits".into());
    }
    let is_keyword = words::ADDRESS_SPACES.contains(&word);
    (is_keyword && reader.is_member(i)).then(|| format!("`{word}` is a keyword and cannot name a member"))
}

fn number(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    if lower.ends_with("ll") || lower.ends_with("llu") {
        return Some(format!("`{text}`: Metal has no long long"));
    }
    let is_long_double = lower.ends_with('l') && lower.contains('.') && !lower.starts_with("0x");
    is_long_double.then(|| format!("`{text}`: Metal has no long double"))
}

fn literal(reader: &Reader<'_>, i: usize, token: &Token<'_>) -> Option<String> {
    let names = i >= 2 && reader.is_any(i - 2, &["host_name", "_Pragma"]);
    let allowed = !token.text.starts_with('"') || names || reader.is_argument_of(i, "static_assert");
    (!allowed).then(|| "a string: kernels have no use for one".into())
}

fn lambda(reader: &Reader<'_>, i: usize) -> Option<String> {
    let starts_expression = i > 0 && reader.is_any(i - 1, &["=", "(", ",", "return", "{", ";"]);
    let is_lambda = reader.is(i, "[") && starts_expression && !reader.is(i + 1, "[");
    is_lambda.then(|| "a lambda: Metal has none".into())
}

fn directive(text: &str) -> Option<String> {
    let name = text[1..].trim_start();
    if let Some(pragma) = name.strip_prefix("pragma") {
        let is_opencl = pragma.trim_start().starts_with("OPENCL");
        return is_opencl.then(|| "`#pragma OPENCL` is not Metal".into());
    }
    // Line markers of the preprocessor are a number.
    let known = name.starts_with(|c: char| c.is_ascii_digit()) || name.starts_with("line");
    (!known).then(|| format!("`{text}`: unknown directive"))
}

/// Checks that each pointer and reference says where it points: `*` and `&` after a type need an address space before it.
pub(super) fn pointers(reader: &Reader<'_>, declarations: &Declarations) -> Checked<()> {
    let pointers = Pointers { reader, declarations };
    for i in 1..reader.tokens.len() {
        if !reader.is_any(i, &["*", "&", "&&"]) {
            continue;
        }
        if pointers.is_bare_pointer_to_pointer(i) {
            let message = "a pointer to a pointer names the address space of both: `device float* thread*`";
            return reader.fail(i, message);
        }
        let Some(target) = pointers.target(i) else { continue };
        if !pointers.has_address_space(target, i) {
            let kind = if reader.is(i, "*") { "pointer" } else { "reference" };
            let target = reader.tokens[target].text;
            let message = format!(
                "a {kind} to `{target}` has no address space: write device, constant, threadgroup or thread"
            );
            return reader.fail(i, message);
        }
    }
    Ok(())
}

struct Pointers<'r, 'a> {
    reader: &'r Reader<'a>,
    declarations: &'r Declarations,
}

impl Pointers<'_, '_> {
    /// Returns true if a token names a type, rather than a value or a member.
    fn is_type(&self, i: usize) -> bool {
        let is_type = |word| words::is_type(word) || self.declarations.is_type(i, word);
        !self.reader.is_member(i) && self.reader.word(i).is_some_and(is_type)
    }

    /// The token before the `*` or `&` at `i`, qualifiers skipped.
    fn before(&self, i: usize) -> usize {
        (1..i).rev().find(|&k| !self.reader.is_any(k, &["const", "volatile"])).unwrap_or(0)
    }

    /// Returns true if `i` is the second mark of `float**` or `const*&`.
    fn is_bare_pointer_to_pointer(&self, i: usize) -> bool {
        let before = i - 1;
        before > 0
            && self.reader.is(before, "*")
            && (self.is_type(before - 1) || self.reader.is(before - 1, "const"))
    }

    /// The type, or the `*`, that the mark at `i` makes a pointer or a reference to; none for a product or a bit-and.
    fn target(&self, i: usize) -> Option<usize> {
        let before = self.before(i);
        if self.is_type(before) {
            return Some(before);
        }
        if self.reader.is(before, ">") {
            return self.template(before);
        }
        // `* const *`.
        (before < i - 1 && self.reader.is(before, "*")).then_some(before)
    }

    /// The name of the type template whose arguments end with the `>` at `close`, as in `vec<float, 4>*`.
    fn template(&self, close: usize) -> Option<usize> {
        let mut depth = 0;
        for i in (0..=close).rev() {
            match self.reader.tokens[i].text {
                ">" => depth += 1,
                "<" => depth -= 1,
                ";" | "{" | "}" => return None,
                _ => {}
            }
            if depth == 0 {
                let name = i.checked_sub(1)?;
                let word = self.reader.word(name)?;
                return (words::is_type_template(word) || self.declarations.is_type(name, word))
                    .then_some(name);
            }
        }
        None
    }

    /// Returns true if an address space stands between the target and the mark, or among the words of the
    /// type before it.
    fn has_address_space(&self, target: usize, mark: usize) -> bool {
        const BESIDE_TYPES: [&str; 11] = [
            "const",
            "volatile",
            "unsigned",
            "signed",
            "::",
            "metal",
            "struct",
            "typename",
            "constexpr",
            "static",
            "inline",
        ];
        let is_space = |i: usize| self.reader.is_any(i, &words::ADDRESS_SPACES);
        if (target + 1..mark).any(is_space) {
            return true;
        }
        let outside = (0..target).rev().find(|&i| !(self.reader.is_any(i, &BESIDE_TYPES) || self.is_type(i)));
        outside.is_some_and(is_space)
    }
}

/// Checks that vectors are not cast by C-style casts, which would reinterpret bits, nor by `static_cast`.
pub(super) fn casts(reader: &Reader<'_>) -> Checked<()> {
    for i in 1..reader.tokens.len() {
        let Some(word) = reader.word(i).filter(|&word| words::is_vector(word) || word == "vec") else {
            continue;
        };
        let has_arguments = word == "vec" && reader.is(i + 1, "<");
        let Some(after) = (if has_arguments { reader.angle_closed(i + 1) } else { Some(i + 1) }) else {
            continue;
        };
        if reader.is(after, "(") && !reader.is_member(i) {
            continue;
        }
        if reader.is(i - 1, "(") && reader.is(after, ")") && i > 1 {
            // `f(float4)` and `sizeof(float4)` are no casts, and neither is one without an operand.
            let before = reader.tokens[i - 2];
            let is_call = before.kind == TokenKind::Word && before.text != "return"
                || matches!(before.text, ">" | "]" | ")");
            let has_operand = reader.tokens.get(after + 1).is_some_and(|token| {
                matches!(token.kind, TokenKind::Word | TokenKind::Number) || token.text == "("
            });
            if has_operand && !is_call {
                return reader.fail(i, format!("a C-style cast to `{word}`: write `{word}(...)`"));
            }
        } else if i >= 2 && reader.is(i - 1, "<") && reader.is(i - 2, "static_cast") {
            return reader.fail(i, format!("static_cast to `{word}`: write `{word}(...)`"));
        }
    }
    Ok(())
}

/// Checks that no function keeps a variable between calls.
pub(super) fn statics(reader: &Reader<'_>, declarations: &Declarations) -> Checked<()> {
    let mut bodies = declarations.functions.iter().flat_map(|function| function.body.clone());
    match bodies.find(|&i| reader.is(i, "static")) {
        Some(i) => reader.fail(i, "`static` in a function: Metal keeps no variables between calls"),
        None => Ok(()),
    }
}

/// Checks that no function calls itself, directly or through others. Functions with several definitions are passed over:
/// one overload may call another.
pub(super) fn recursion(reader: &Reader<'_>, declarations: &Declarations) -> Checked<()> {
    let only_definition = |name: &str| {
        let mut same = declarations.functions.iter().filter(|f| f.name == name && !f.body.is_empty());
        same.next().filter(|_| same.next().is_none())
    };
    for function in &declarations.functions {
        if only_definition(&function.name).is_none() {
            continue;
        }
        let mut open: Vec<&Function> = vec![function];
        let mut seen: HashSet<usize> = HashSet::new();
        while let Some(caller) = open.pop() {
            for i in caller.body.clone() {
                let is_call = reader.is_any(i + 1, &["(", "<"]);
                let Some(word) = reader.word(i).filter(|_| is_call) else { continue };
                if word == function.name {
                    return reader.fail(i, format!("`{word}` calls itself: Metal has no recursion"));
                }
                open.extend(only_definition(word).filter(|called| seen.insert(called.at)));
            }
        }
    }
    Ok(())
}
