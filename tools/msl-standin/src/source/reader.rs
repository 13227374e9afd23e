//! The tokens of a program with its lines and attributes, and how to find one's way among them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::diagnostic::{Checked, Diagnostic};
use super::lex::{Token, TokenKind, tokens};

/// One of the attributes between `[[` and `]]`.
#[derive(Clone, Debug)]
pub(super) struct Attribute {
    pub(super) name: String,
    pub(super) argument: Option<String>,
    /// Byte of the program at which it starts.
    pub(super) at: usize,
}

impl Attribute {
    /// The argument, where it is a number.
    pub(super) fn number<T: std::str::FromStr>(&self) -> Option<T> {
        self.argument.as_deref().and_then(|argument| argument.trim().parse().ok())
    }
}

#[derive(Clone, Copy, Debug)]
struct Line {
    /// Byte of the program at which it starts.
    at: usize,
    /// Its number, as the preprocessor's line markers say.
    number: usize,
}

/// A program as tokens. Ranges are ranges of token indices unless they say otherwise.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    pub(super) source: &'a str,
    pub(super) tokens: Vec<Token<'a>>,
    lines: Vec<Line>,
    /// Attributes that are no longer among the tokens, by the index of the token that follows them.
    attributes: BTreeMap<usize, Vec<Attribute>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(source: &'a str) -> Self {
        let mut lines = Vec::new();
        let (mut at, mut number) = (0, 1);
        for line in source.split_inclusive('\n') {
            lines.push(Line { at, number });
            // `# 12 "file"`, as the preprocessor writes it: the number of the next line.
            let marker =
                line.strip_prefix("# ").and_then(|r| r.split(' ').next()).and_then(|n| n.parse().ok());
            number = marker.unwrap_or(number + 1);
            at += line.len();
        }
        Self { source, tokens: tokens(source), lines, attributes: BTreeMap::new() }
    }

    /// Replaces the tokens by fewer ones, and sets the attributes that stood among them.
    pub(super) fn with_attributes(
        self,
        tokens: Vec<Token<'a>>,
        attributes: BTreeMap<usize, Vec<Attribute>>,
    ) -> Self {
        Self { tokens, attributes, ..self }
    }

    /// The number of the line that a byte is in.
    pub(super) fn line(&self, at: usize) -> usize {
        let after = self.lines.partition_point(|line| line.at <= at);
        self.lines.get(after.saturating_sub(1)).map_or(1, |line| line.number)
    }

    /// An error at token `i`.
    pub(super) fn fail<T>(&self, i: usize, message: impl Into<String>) -> Checked<T> {
        let at = self.tokens.get(i).or(self.tokens.last()).map_or(0, |token| token.at);
        Err(Diagnostic { line: self.line(at), message: message.into() })
    }

    /// An error at an attribute.
    pub(super) fn fail_at<T>(&self, attribute: &Attribute, message: impl Into<String>) -> Checked<T> {
        Err(Diagnostic { line: self.line(attribute.at), message: message.into() })
    }

    pub(super) fn is(&self, i: usize, text: &str) -> bool {
        self.tokens.get(i).is_some_and(|token| token.text == text)
    }

    pub(super) fn is_any(&self, i: usize, texts: &[&str]) -> bool {
        self.tokens.get(i).is_some_and(|token| texts.contains(&token.text))
    }

    /// Token `i`, if it is a word.
    pub(super) fn word(&self, i: usize) -> Option<&'a str> {
        self.tokens.get(i).filter(|token| token.kind == TokenKind::Word).map(|token| token.text)
    }

    /// Returns true if token `i` names a member of an object.
    pub(super) fn is_member(&self, i: usize) -> bool {
        i > 0 && self.is_any(i - 1, &[".", "->"])
    }

    /// Returns true if one of the tokens has this text.
    pub(super) fn contains(&self, mut range: Range<usize>, text: &str) -> bool {
        range.any(|i| self.is(i, text))
    }

    /// Returns true if token `i` is between the parentheses that follow `name`.
    pub(super) fn is_argument_of(&self, i: usize, name: &str) -> bool {
        let mut open = 0usize;
        for n in (1..i).rev() {
            match self.tokens[n].text {
                ")" => open += 1,
                "(" if open > 0 => open -= 1,
                "(" => return self.is(n - 1, name),
                ";" | "{" | "}" => return false,
                _ => {}
            }
        }
        false
    }

    /// The program's text of a range, on one line.
    pub(super) fn text(&self, range: Range<usize>) -> String {
        if range.is_empty() {
            return String::new();
        }
        self.source[self.tokens[range.start].at..self.tokens[range.end - 1].end()].replace('\n', " ")
    }

    /// The index after the bracket that closes the one at `open`.
    pub(super) fn closed(&self, open: usize) -> Checked<usize> {
        let mut depth = 0i32;
        for i in open..self.tokens.len() {
            match self.tokens[i].text {
                "(" | "[" | "{" => depth += 1,
                "[[" => depth += 2,
                ")" | "]" | "}" => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Ok(i + 1);
            }
        }
        self.fail(open, format!("`{}` is never closed", self.tokens[open].text))
    }

    /// The index after the `>` that closes the `<` at `open`, if `open` starts a list of template arguments.
    pub(super) fn angle_closed(&self, open: usize) -> Option<usize> {
        let mut depth = 0i32;
        let mut i = open;
        while i < self.tokens.len() {
            match self.tokens[i].text {
                "<" => depth += 1,
                ">" => depth -= 1,
                "(" | "[" => i = self.closed(i).ok()? - 1,
                ";" | "{" | "}" => return None,
                _ => {}
            }
            if depth == 0 {
                return Some(i + 1);
            }
            i += 1;
        }
        None
    }

    /// Splits a range at its commas, except those inside brackets and template arguments.
    pub(super) fn split(&self, range: Range<usize>) -> Checked<Vec<Range<usize>>> {
        let mut found = Vec::new();
        let (mut start, mut i) = (range.start, range.start);
        while i < range.end {
            match self.tokens[i].text {
                "(" | "[" | "{" => i = self.closed(i)?,
                "<" => i = self.angle_closed(i).filter(|&end| end <= range.end).unwrap_or(i + 1),
                "," => {
                    found.push(start..i);
                    i += 1;
                    start = i;
                }
                _ => i += 1,
            }
        }
        if start < range.end || !found.is_empty() {
            found.push(start..range.end);
        }
        Ok(found)
    }

    /// The first token from `i` on that has this text, past any brackets; `end` where there is none before it.
    pub(super) fn find(&self, mut i: usize, end: usize, text: &str) -> Checked<usize> {
        while i < end && !self.is(i, text) {
            i = if self.is_any(i, &["(", "[", "{"]) { self.closed(i)? } else { i + 1 };
        }
        Ok(i)
    }

    /// The index of the name that a declaration without an initialiser declares: before its dimensions, if it has any.
    pub(super) fn declared_name(&self, declaration: Range<usize>) -> usize {
        let end = declaration.end;
        declaration.clone().find(|&i| self.is(i, "[")).unwrap_or(end) - 1
    }

    /// Attributes that stood before one of the tokens from `from` up to and including `to`.
    pub(super) fn attributes_in(&self, from: usize, to: usize) -> Vec<Attribute> {
        self.attributes.range(from..=to.max(from)).flat_map(|(_, list)| list.iter().cloned()).collect()
    }
}
