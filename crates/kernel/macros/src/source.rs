//! An item as its author wrote it, from the places of its tokens. Comments are lost, documentation is kept.

use proc_macro2::{Delimiter, LineColumn, Spacing, TokenStream, TokenTree};

/// The source of the tokens, with the lines and the indentation they were written with.
pub(crate) fn of(tokens: TokenStream) -> String {
    let mut writer = Writer::default();
    writer.tokens(tokens);
    writer.out
}

#[derive(Default)]
struct Writer {
    out: String,
    /// Where the token before ends in the file.
    end: Option<LineColumn>,
    /// The column of the first token.
    margin: usize,
    /// No space follows, where tokens have no places.
    joint: bool,
}

impl Writer {
    fn tokens(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    let doc = match tokens.peek() {
                        Some(TokenTree::Group(group)) => documentation(group),
                        _ => None,
                    };
                    let span = punct.span();
                    match doc {
                        Some(text) => {
                            tokens.next();
                            self.write(&format!("///{text}"), span.start(), span.end(), false);
                        }
                        None => self.write("#", span.start(), span.end(), true),
                    }
                }
                TokenTree::Group(group) => {
                    let (open, close) = match group.delimiter() {
                        Delimiter::Parenthesis => ("(", ")"),
                        Delimiter::Brace => ("{", "}"),
                        Delimiter::Bracket => ("[", "]"),
                        Delimiter::None => ("", ""),
                    };
                    let (first, last) = (group.span_open(), group.span_close());
                    if !open.is_empty() {
                        self.write(open, first.start(), first.end(), true);
                    }
                    self.tokens(group.stream());
                    if !close.is_empty() {
                        self.joint = true;
                        self.write(close, last.start(), last.end(), false);
                    }
                }
                TokenTree::Punct(punct) => {
                    let (span, joint) = (punct.span(), punct.spacing() == Spacing::Joint);
                    self.write(&punct.as_char().to_string(), span.start(), span.end(), joint);
                }
                other => {
                    let span = other.span();
                    self.write(&other.to_string(), span.start(), span.end(), false);
                }
            }
        }
    }

    fn write(&mut self, text: &str, start: LineColumn, end: LineColumn, joint: bool) {
        match self.end {
            None => self.margin = start.column,
            Some(before) if start.line > before.line => {
                // An empty line stays, and a comment of one line becomes one.
                self.out.push('\n');
                if start.line == before.line + 2 {
                    self.out.push('\n');
                }
                let indent = start.column.saturating_sub(self.margin);
                self.out.extend(std::iter::repeat_n(' ', indent));
            }
            Some(before) if start.line == before.line && start.column >= before.column => {
                if start.column > before.column {
                    self.out.push(' ');
                }
            }
            // Tokens of a macro have no place of their own.
            Some(_) if self.joint => {}
            Some(_) => self.out.push(' '),
        }
        self.out.push_str(text);
        self.end = Some(end);
        self.joint = joint;
    }
}

/// The text of `[doc = "text"]`.
fn documentation(group: &proc_macro2::Group) -> Option<String> {
    let mut tokens = group.stream().into_iter();
    match (tokens.next(), tokens.next(), tokens.next()) {
        (Some(TokenTree::Ident(name)), Some(TokenTree::Punct(_)), Some(TokenTree::Literal(text)))
            if name == "doc" =>
        {
            let text: syn::LitStr = syn::parse2(TokenTree::Literal(text).into()).ok()?;
            Some(text.value())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn lines_and_indentation_stay() {
        let source = "/// Doubles.\n    pub fn double<T: Element>(x: T) -> f32 {\n        let y = x.to_f32();\n\n        y * 2.0\n    }";
        let tokens = source.parse().unwrap();
        // The first token is at the margin.
        assert_eq!(super::of(tokens), source);
    }
}
