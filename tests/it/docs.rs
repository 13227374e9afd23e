//! Links of the documentation lead to files and headings that are there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Links that hold on crates.io and docs.rs name the repository.
const REPOSITORY: [&str; 3] = [
    "https://github.com/flashtile/flashtile/blob/main/",
    "https://github.com/flashtile/flashtile/tree/main/",
    "https://raw.githubusercontent.com/flashtile/flashtile/main/",
];

/// The Markdown files of the repository, from its root.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if path.is_dir() && !path.is_symlink() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found
}

/// Text without what stands in backquotes, in one line or several.
fn prose(text: &str) -> String {
    let mut code = false;
    let mut kept = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
        } else if !code {
            let parts = line.split('`').step_by(2);
            kept.extend(parts.flat_map(|part| [part, " "]));
        }
        kept.push('\n');
    }
    kept
}

/// The targets of a page's links: `[text](target)` and `[name]: target`.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let inline = prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(to, _)| to);
    let named = prose.lines().filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    let sources = prose.split("src=\"").skip(1).chain(prose.split("srcset=\"").skip(1));
    let images = sources.filter_map(|rest| rest.split_once('"')).map(|(to, _)| to);
    let all = inline.chain(named.map(|(_, to)| to)).chain(images);
    all.map(|to| to.trim().to_owned()).collect()
}

/// Names of headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut code = false;
    let mut all = BTreeSet::new();
    for line in text.lines() {
        code ^= line.starts_with("```");
        if let (false, Some(heading)) = (code, line.strip_prefix('#')) {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
            all.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
        }
    }
    all
}

#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut count, mut broken) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in links(&text) {
            let inside = REPOSITORY.iter().find_map(|prefix| link.strip_prefix(prefix));
            let (folder, target) = match inside {
                Some(path) => (root, path),
                None if link.contains("://") || link.starts_with("mailto:") => continue,
                None => (page.parent().unwrap(), link.as_str()),
            };
            count += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = if path.is_empty() { page.clone() } else { folder.join(path) };
            let found = file.exists()
                && (anchor.is_empty() || anchors(&std::fs::read_to_string(&file).unwrap()).contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", page.strip_prefix(root).unwrap().display()));
            }
        }
    }
    assert!(broken.is_empty(), "{} of {count} links lead nowhere:\n{}", broken.len(), broken.join("\n"));
    assert!(count > 50, "only {count} links were found");
}

#[test]
fn a_link_that_leads_nowhere_would_be_found() {
    let page = "# Two words, `code`\n[a](b.md#c) `[no](x)` and\n```\n[no](y)\n```\n[name]: d.md\n<img src=\"e.svg\">\n";
    assert_eq!(links(page), ["b.md#c", "d.md", "e.svg"]);
    assert_eq!(anchors(page).into_iter().collect::<Vec<_>>(), ["two-words-code"]);
}
