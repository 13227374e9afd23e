//! The document says what is tested: its code is that of these files, its printed code is what was printed.

use flashtile_kernel::Target;
use std::path::PathBuf;

pub(crate) fn read(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()))
}

/// The document, in one line: texts may be wrapped in it.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Panics where the document does not have this message.
pub(crate) fn says(message: &str) {
    let document = words(&read("../../docs/kernel-language.md"));
    assert!(document.contains(&words(message)), "docs/kernel-language.md does not say\n{message}");
}

/// The lines of code that are not empty, without their indentation.
fn lines(code: &str) -> Vec<&str> {
    code.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}

/// Returns true if the code contains every item of a block, or its statements, line by line.
fn has(code: &str, block: &str) -> bool {
    let code = lines(code);
    let mut items = vec![String::new()];
    for paragraph in block.split("\n\n") {
        let goes_on = paragraph.starts_with([' ', '}']);
        match items.last_mut().filter(|_| goes_on) {
            Some(item) => item.push_str(&format!("\n{paragraph}")),
            None => items.push(paragraph.to_owned()),
        }
    }
    let items = items.iter().map(|item| lines(item)).filter(|item| !item.is_empty());
    items.into_iter().all(|item| code.windows(item.len()).any(|part| part == item))
}

#[test]
fn its_code_is_tested() {
    let document = read("../../docs/kernel-language.md");
    let mut sources: Vec<String> = ["first", "sums", "decode", "language", "matrices"]
        .iter()
        .map(|name| read(&format!("tests/guide/{name}.rs")))
        .collect();
    sources.push(read("../../examples/own-kernel/src/main.rs"));
    let printed: Vec<String> = [Target::Metal, Target::Cuda]
        .iter()
        .map(|target| crate::first::add::instance().source(*target))
        .collect();
    let mut blocks = 0;
    let mut rest = &document[..];
    while let Some((_, after)) = rest.split_once("\n```") {
        let Some((language, after)) = after.split_once('\n') else { break };
        let Some((block, after)) = after.split_once("\n```") else {
            panic!("a block without an end: {after}")
        };
        rest = after;
        blocks += 1;
        let found = match language {
            "rust" => sources.iter().any(|source| has(source, block)),
            "cpp" => printed.iter().any(|text| has(text, block)),
            // Texts are checked where they are made.
            "text" => true,
            "sh" | "toml" => true,
            other => panic!("a block of {other:?}"),
        };
        assert!(found, "this code of the document is in no tested file:\n{block}");
    }
    assert!(blocks >= 10, "{blocks} blocks");
}
