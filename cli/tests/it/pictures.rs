//! Pictures of plans.

use crate::commands::ok;
use crate::files::{Folder, assert_refused, flashtile};

#[test]
fn pictures_are_named_after_their_format() {
    let folder = Folder::empty();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for name in ["tiles.png", "tiles", "svg"] {
        let why = format!("{name}: --svg writes SVG, expected a name such as ");
        assert_refused(&flashtile(["plan", "--svg", &path(name)]), &why, name);
    }
    assert!(folder.names().is_empty());
    ok(&["plan", "--svg", &path("tiles.SVG")]);
    assert_eq!(folder.names(), ["tiles.SVG"]);
}

#[test]
fn tiles_are_drawn_in_words() {
    let folder = Folder::empty();
    let svg = folder.path().join("tiles.svg");
    let shape = ["plan", "--q-len", "4096", "--head-dim", "64", "--causal", "--window", "1023", "--svg"];
    let text = ok(&[&shape[..], &[svg.to_str().unwrap()]].concat());
    let counts = text.lines().find(|line| line.contains("partial")).unwrap();
    let picture = std::fs::read_to_string(&svg).unwrap();
    for words in [
        "<title>causal, window 1023, 4096 x 4096</title>",
        ">1024<",
        ">4096<",
        ">key<",
        ">query<",
        "crispEdges",
        "prefers-color-scheme:dark",
    ] {
        assert!(picture.contains(words), "{words} in {picture}");
    }
    for kind in ["skipped", "partial", "full"] {
        let words: Vec<&str> = counts.split_whitespace().collect();
        let at = words.iter().position(|word| *word == kind).unwrap();
        assert!(picture.contains(&format!(">{} {kind}<", words[at + 1])), "{counts}: {picture}");
    }
    assert!(picture.len() < 20_000, "{} bytes", picture.len());
}
