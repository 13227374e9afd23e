//! Preprocessor lines that are handled before a program is read.

use super::diagnostic::{Checked, Diagnostic};
use super::words;

/// Returns true if a program has to be preprocessed before it can be read.
pub(crate) fn needs_preprocessor(source: &str) -> bool {
    const DIRECTIVES: [&str; 7] = ["define", "if", "undef", "el", "end", "error", "warning"];
    source.lines().any(|line| {
        let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
        directive.is_some_and(|d| DIRECTIVES.iter().any(|word| d.starts_with(word)))
    })
}

/// The program without its includes. Lines keep their numbers.
///
/// # Errors
/// For a header that the stand-in lacks, and for a program that does not include `<metal_stdlib>`.
pub(crate) fn strip_includes(source: &str) -> Checked<String> {
    let mut out = String::with_capacity(source.len());
    let mut has_stdlib = false;
    for (i, line) in source.lines().enumerate() {
        let directive = line.trim_start().strip_prefix('#').map(str::trim_start);
        if let Some(rest) = directive.and_then(|d| d.strip_prefix("include")) {
            let rest = rest.trim();
            let name = rest.strip_prefix('<').and_then(|r| r.split('>').next()).unwrap_or(rest);
            if !words::HEADERS.contains(&name) {
                let message = format!("#include {name}: the stand-in has no such header");
                return Err(Diagnostic { line: i + 1, message });
            }
            has_stdlib |= name == "metal_stdlib";
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    if !has_stdlib {
        return Err(Diagnostic { line: 1, message: "the source does not #include <metal_stdlib>".into() });
    }
    Ok(out)
}
