//! Checks that the macros leave to rustc: operators refuse types, names must be items of the language. Each
//! of `tests/ui/*.rs` is compiled; its errors, with lines, are in the `.txt` beside it. With
//! `FLASHTILE_BLESS=1` the tests write these files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest library of a crate that was built beside this test.
fn library(folder: &Path, name: &str, extension: &str) -> PathBuf {
    let files = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = files
        .filter(|path| {
            let file = path.file_name().unwrap().to_string_lossy();
            file.starts_with(&format!("{}{name}-", std::env::consts::DLL_PREFIX))
                && path.extension().is_some_and(|found| found == extension)
        })
        .collect();
    found.sort_by_key(|path| path.metadata().unwrap().modified().unwrap());
    found.pop().unwrap()
}

/// Messages and places of rustc's errors, sorted by place.
fn errors(source: &Path) -> String {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let name = source.file_name().unwrap().to_string_lossy();
    let of = |name: &str, path: PathBuf| format!("{name}={}", path.display());
    let macros = library(&deps, "flashtile_kernel_macros", std::env::consts::DLL_EXTENSION);
    let output = Command::new(rustc)
        .args(["--edition=2024", "--emit=metadata", "--error-format=short", "-Awarnings", "-o"])
        .arg(std::env::temp_dir().join(format!("flashtile-ui-{}-{name}.rmeta", std::process::id())))
        .arg("-L")
        .arg(format!("dependency={}", deps.display()))
        .args(["--extern", &of("flashtile_kernel", library(&deps, "flashtile_kernel", "rlib"))])
        .args(["--extern", &of("flashtile_kernel_macros", macros)])
        .arg(source)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let mut found: Vec<(u32, u32, String)> = Vec::new();
    for line in text.lines() {
        let Some((_, rest)) = line.split_once(&format!("{name}:")) else { continue };
        let mut parts = rest.splitn(3, ':');
        let mut number = || parts.next().and_then(|part| part.parse().ok());
        let (Some(row), Some(column)) = (number(), number()) else { continue };
        found.push((row, column, parts.next().map(words).unwrap_or_default()));
    }
    found.sort();
    found.dedup();
    let lines: Vec<String> = std::fs::read_to_string(source).unwrap().lines().map(str::to_owned).collect();
    let mut all = String::new();
    for (row, column, message) in found {
        let pointer = " ".repeat(column as usize - 1);
        writeln!(all, "{}\n{pointer}^ {message}\n", lines[row as usize - 1]).unwrap();
    }
    if all.is_empty() { text } else { all }
}

/// The message where it is ours, or the code of rustc's own error, whose words change with rustc.
fn words(message: &str) -> String {
    let message = message.trim();
    let (code, words) = message.split_once(": ").unwrap_or((message, ""));
    let words = words.split(": evaluation of").next().unwrap_or_default();
    match code {
        "error[E0080]" => words.trim_start_matches("evaluation panicked: ").to_owned(),
        // rustc explains its own sentence in words of its version.
        "error[E0277]" => words.split_inclusive("is not satisfied").next().unwrap_or_default().to_owned(),
        _ => code.to_owned(),
    }
}

#[test]
fn rustc_refuses_types_at_the_operand() {
    refuses("types.rs");
}

#[test]
fn rustc_refuses_literals_that_wrap_where_the_lint_is_allowed() {
    refuses("lints.rs");
}

#[test]
fn rustc_refuses_names_that_are_not_the_languages_own() {
    refuses("names.rs");
}

fn refuses(name: &str) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ui").join(name);
    let (golden, found) = (source.with_extension("txt"), errors(&source));
    if std::env::var_os("FLASHTILE_BLESS").is_some() {
        std::fs::write(&golden, &found).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&golden).unwrap_or_default(), found);
}
