//! Goldens: printed source, and refusals with their places and words.
//!
//! `goldens/printed/*.rs` print as the `.cpp` beside them, `goldens/refused/*.rs` are refused with the errors of the `.txt`
//! beside them. With `FLASHTILE_BLESS=1` the tests write what they find.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use proc_macro2::{LineColumn, TokenStream, TokenTree};
use quote::ToTokens;

/// The expansion of every item of a file that has an attribute of ours.
fn expansions(source: &str) -> Vec<TokenStream> {
    let file = syn::parse_file(source).unwrap();
    file.items.into_iter().filter_map(expansion).collect()
}

fn expansion(mut item: syn::Item) -> Option<TokenStream> {
    let attributes = match &mut item {
        syn::Item::Fn(item) => &mut item.attrs,
        syn::Item::Struct(item) => &mut item.attrs,
        syn::Item::Const(item) => &mut item.attrs,
        syn::Item::Static(item) => &mut item.attrs,
        syn::Item::Enum(item) => &mut item.attrs,
        _ => return None,
    };
    let names = ["kernel", "device", "params", "constant"];
    let n =
        attributes.iter().position(|attribute| names.iter().any(|name| attribute.path().is_ident(name)))?;
    let attribute = attributes.remove(n);
    let arguments = match &attribute.meta {
        syn::Meta::List(list) => list.tokens.clone(),
        _ => TokenStream::new(),
    };
    let item = item.to_token_stream();
    Some(match attribute.path().get_ident().unwrap().to_string().as_str() {
        "kernel" => crate::kernel::kernel(arguments, item),
        "device" => crate::expand::device(&arguments, item),
        "params" => crate::expand::params(&arguments, item),
        _ => crate::expand::constant(&arguments, item),
    })
}

/// The string of every `name(..)` or `name!{..}` in the tokens, with where it starts and ends.
fn strings(tokens: TokenStream, name: &str, found: &mut Vec<(String, LineColumn, LineColumn)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (n, token) in tokens.iter().enumerate() {
        let TokenTree::Group(group) = token else { continue };
        let before = |back: usize| n.checked_sub(back).map(|n| tokens[n].to_string());
        let named = [1, 2].into_iter().any(|back| before(back).as_deref() == Some(name));
        match syn::parse2::<syn::LitStr>(group.stream()) {
            Ok(text) if named => {
                let start = if name == "compile_error" { tokens[n - 2].span() } else { group.span() };
                found.push((text.value(), start.start(), group.span().end()));
            }
            _ => strings(group.stream(), name, found),
        }
    }
}

fn printed(source: &str) -> String {
    let mut all = String::new();
    for expansion in expansions(source) {
        let mut found = Vec::new();
        strings(expansion.clone(), "compile_error", &mut found);
        assert!(found.is_empty(), "{found:?}");
        strings(expansion, "Printed", &mut found);
        for (text, _, _) in found {
            if !all.is_empty() {
                all.push('\n');
            }
            all.push_str(&text);
        }
    }
    all
}

/// The errors of a file as rustc shows them.
fn refused(source: &str) -> String {
    let lines: Vec<&str> = source.lines().collect();
    let mut all = String::new();
    for expansion in expansions(source) {
        let mut found = Vec::new();
        strings(expansion.clone(), "compile_error", &mut found);
        let start = expansion.to_string().chars().take(300).collect::<String>();
        assert!(!found.is_empty(), "not refused:\n{start}");
        for (message, start, end) in found {
            let line = lines[start.line - 1];
            let width =
                if end.line == start.line { end.column - start.column } else { line.len() - start.column };
            let number = start.line.to_string();
            let margin = " ".repeat(number.len());
            writeln!(all, "error: {message}").unwrap();
            writeln!(all, "{margin} |\n{number} | {line}").unwrap();
            writeln!(all, "{margin} | {}{}\n", " ".repeat(start.column), "^".repeat(width.max(1))).unwrap();
        }
    }
    all
}

fn goldens(folder: &str, extension: &str, of: impl Fn(&str) -> String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens").join(folder);
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut sources: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect();
    sources.sort();
    assert!(!sources.is_empty());
    let mut differ = Vec::new();
    for source in sources {
        let found = of(&std::fs::read_to_string(&source).unwrap());
        let golden = source.with_extension(extension);
        if std::env::var_os("FLASHTILE_BLESS").is_some() {
            std::fs::write(&golden, &found).unwrap();
        } else if std::fs::read_to_string(&golden).unwrap_or_default() != found {
            differ.push(format!("{}:\n{found}", golden.display()));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn what_is_accepted_prints() {
    goldens("printed", "cpp", printed);
}

#[test]
fn what_is_refused_says_why_and_what_to_write() {
    goldens("refused", "txt", refused);
}

#[test]
fn a_file_as_written_prints_as_written() {
    let source = "#[device]\npub fn f(x: f32) -> f32 {\n    // Lost.\n    x * 2.0\n}";
    let item = syn::parse_file(source).unwrap().items.remove(0);
    assert_eq!(crate::source::of(item.to_token_stream()), source.replace("    // Lost.", ""));
}
