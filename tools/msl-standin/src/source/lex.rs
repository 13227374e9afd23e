//! Cuts a program into tokens.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// An identifier or a keyword.
    Word,
    Number,
    /// A string or a character.
    Literal,
    /// One character, or one of `::`, `[[`, `->`, `&&`, `||` and `==`.
    Punctuation,
    /// A whole line of the preprocessor, continuation lines included.
    Directive,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// Byte of the program at which the token starts.
    pub(super) at: usize,
}

impl Token<'_> {
    pub(super) fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

/// The tokens of a program. Comments and white space are dropped.
pub(super) fn tokens(source: &str) -> Vec<Token<'_>> {
    let bytes = source.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line_start) = (0, true);
    while at < bytes.len() {
        if let Some(end) = blank_end(bytes, at) {
            line_start |= bytes[at] == b'\n';
            at = end;
            continue;
        }
        let (kind, end) = token_end(bytes, at, line_start);
        tokens.push(Token { kind, text: &source[at..end], at });
        line_start = false;
        at = end;
    }
    tokens
}

/// The end of the white space or the comment that starts at `at`, if one does.
fn blank_end(bytes: &[u8], at: usize) -> Option<usize> {
    if bytes[at].is_ascii_whitespace() {
        return Some(at + 1);
    }
    match bytes[at..] {
        [b'/', b'/', ..] => Some(line_end(bytes, at)),
        [b'/', b'*', ..] => {
            let close = bytes[at + 2..].windows(2).position(|pair| pair == b"*/");
            Some(close.map_or(bytes.len(), |n| at + 2 + n + 2))
        }
        _ => None,
    }
}

/// The kind and the end of the token that starts at `at`; `#` starts a directive only at the start of a line.
fn token_end(bytes: &[u8], at: usize, line_start: bool) -> (TokenKind, usize) {
    let next = bytes.get(at + 1).copied().unwrap_or(0);
    match bytes[at] {
        b'#' if line_start => (TokenKind::Directive, directive_end(bytes, at)),
        b'"' | b'\'' => (TokenKind::Literal, literal_end(bytes, at)),
        c if c.is_ascii_digit() || (c == b'.' && next.is_ascii_digit()) => {
            (TokenKind::Number, number_end(bytes, at))
        }
        c if in_word(c) => {
            let length = bytes[at..].iter().position(|&c| !in_word(c));
            (TokenKind::Word, length.map_or(bytes.len(), |n| at + n))
        }
        b':' | b'[' | b'&' | b'|' | b'=' if next == bytes[at] => (TokenKind::Punctuation, at + 2),
        b'-' if next == b'>' => (TokenKind::Punctuation, at + 2),
        _ => (TokenKind::Punctuation, at + 1),
    }
}

/// Returns true if a byte may be in a word. All of UTF-8 beyond ASCII may, so that no token ends inside a
/// character.
fn in_word(c: u8) -> bool {
    c.is_ascii_alphanumeric() || c == b'_' || c >= 0x80
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|&c| c == b'\n').map_or(bytes.len(), |n| at + n)
}

fn directive_end(bytes: &[u8], at: usize) -> usize {
    let mut end = line_end(bytes, at);
    while end < bytes.len() && bytes[end - 1] == b'\\' {
        end = line_end(bytes, end + 1);
    }
    end
}

/// The end of a string or a character, which ends at its line's end at the latest.
fn literal_end(bytes: &[u8], at: usize) -> usize {
    let quote = bytes[at];
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != quote && bytes[end] != b'\n' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

fn number_end(bytes: &[u8], at: usize) -> usize {
    let is_hexadecimal = bytes[at..].starts_with(b"0x");
    let mut end = at;
    while let Some(&c) = bytes.get(end) {
        let exponent_sign = matches!(c, b'+' | b'-')
            && match bytes[end - 1] {
                b'p' | b'P' => true,
                b'e' | b'E' => !is_hexadecimal,
                _ => false,
            };
        if !(in_word(c) || c == b'.' || exponent_sign) {
            break;
        }
        end += 1;
    }
    end
}

#[cfg(test)]
mod tests {
    use super::{TokenKind, tokens};

    fn cut(source: &str) -> Vec<(TokenKind, &str)> {
        tokens(source).iter().map(|t| (t.kind, t.text)).collect()
    }

    #[test]
    fn numbers_keep_their_exponents() {
        use TokenKind::{Number, Punctuation};
        assert_eq!(cut("1e-5f"), [(Number, "1e-5f")]);
        assert_eq!(cut("0x1p+3"), [(Number, "0x1p+3")]);
        assert_eq!(cut("0x1e-5"), [(Number, "0x1e"), (Punctuation, "-"), (Number, "5")]);
        assert_eq!(cut(".5"), [(Number, ".5")]);
    }

    #[test]
    fn comments_and_directives() {
        use TokenKind::{Directive, Literal, Punctuation, Word};
        assert_eq!(cut("a /* b */ c // d\n e /* f"), [(Word, "a"), (Word, "c"), (Word, "e")]);
        assert_eq!(cut("#pragma x \\\n y\nz"), [(Directive, "#pragma x \\\n y"), (Word, "z")]);
        assert_eq!(cut("a # b"), [(Word, "a"), (Punctuation, "#"), (Word, "b")]);
        assert_eq!(cut(r#""a\"b" '\''"#), [(Literal, r#""a\"b""#), (Literal, r"'\''")]);
        assert_eq!(
            cut("a::b->c[[d]]"),
            [
                (Word, "a"),
                (Punctuation, "::"),
                (Word, "b"),
                (Punctuation, "->"),
                (Word, "c"),
                (Punctuation, "[["),
                (Word, "d"),
                (Punctuation, "]"),
                (Punctuation, "]"),
            ]
        );
    }
}
