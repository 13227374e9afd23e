//! Text from files on a terminal.

use std::borrow::Cow;

/// Makes text safe for a terminal. Names in files may contain any character, so control characters and those that
/// embed, override or isolate directions of text are escaped as in JSON, unless they are among `kept`.
pub(crate) fn escaped<'t>(text: &'t str, kept: &[char]) -> Cow<'t, str> {
    let is_kept = |c: char| {
        let moves = c.is_control() || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
        !moves || kept.contains(&c)
    };
    if text.chars().all(is_kept) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if is_kept(c) => safe.push(c),
            '\n' => safe.push_str("\\n"),
            '\r' => safe.push_str("\\r"),
            '\t' => safe.push_str("\\t"),
            c => safe.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    safe.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_disturb_a_terminal_are_escaped() {
        assert_eq!(escaped("plain ä \u{5d0}", &[]), "plain ä \u{5d0}");
        assert_eq!(
            escaped("a\nb\u{1b}[2J\u{9b}\u{202e}c\u{2069}", &[]),
            "a\\nb\\u001b[2J\\u009b\\u202ec\\u2069"
        );
        assert_eq!(escaped("a\tb\r\n\u{7}", &['\n', '\t']), "a\tb\\r\n\\u0007");
        let json = serde_json::json!({ "name": "\u{202a}\u{2066}x" });
        let shown: serde_json::Value = serde_json::from_str(&escaped(&json.to_string(), &[])).unwrap();
        assert_eq!(shown, json);
    }
}
