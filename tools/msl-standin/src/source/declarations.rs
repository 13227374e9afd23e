//! Declarations of a program outside of functions.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::diagnostic::Checked;
use super::lex::TokenKind;
use super::reader::{Attribute, Reader};

/// A function of the program, or its declaration.
#[derive(Debug)]
pub(super) struct Function {
    pub(super) name: String,
    pub(super) is_kernel: bool,
    pub(super) is_template: bool,
    pub(super) returns_void: bool,
    /// The tokens between the parentheses.
    pub(super) parameters: Range<usize>,
    /// The tokens between the braces; empty for a declaration.
    pub(super) body: Range<usize>,
    pub(super) attributes: Vec<Attribute>,
    /// Its first token.
    pub(super) at: usize,
}

/// An explicit instantiation of a function template.
#[derive(Debug)]
pub(super) struct Instantiation {
    /// The function with its template arguments.
    pub(super) call: String,
    /// The template's name.
    pub(super) template: String,
    pub(super) host_name: Option<String>,
    pub(super) is_kernel: bool,
    /// Its first token.
    pub(super) at: usize,
}

/// A variable in constant memory.
#[derive(Debug)]
pub(super) struct ProgramConstant {
    pub(super) name: String,
    /// Of its `[[function_constant(n)]]`, if it has one.
    pub(super) index: Option<u32>,
    pub(super) type_name: String,
    /// The whole declaration with its `;`.
    pub(super) tokens: Range<usize>,
    pub(super) initializer: Option<Range<usize>>,
    pub(super) is_array: bool,
    pub(super) is_constexpr: bool,
}

impl ProgramConstant {
    /// The tokens that declare the name: all but the initializer.
    pub(super) fn declarator(&self) -> Range<usize> {
        self.tokens.start..self.initializer.as_ref().map_or(self.tokens.end, |value| value.start)
    }
}

#[derive(Debug, Default)]
pub(super) struct Declarations {
    pub(super) functions: Vec<Function>,
    pub(super) instantiations: Vec<Instantiation>,
    pub(super) constants: Vec<ProgramConstant>,
    /// Bodies of structs, classes, unions and enums, from brace to brace.
    pub(super) type_bodies: Vec<Range<usize>>,
    types: HashSet<String>,
    /// Names of type parameters, with the templates in which each is a type.
    type_parameters: HashMap<String, Vec<Range<usize>>>,
}

impl Declarations {
    /// Returns true if a word at token `i` is a type that the program declares.
    pub(super) fn is_type(&self, i: usize, word: &str) -> bool {
        self.types.contains(word)
            || self.type_parameters.get(word).is_some_and(|all| all.iter().any(|range| range.contains(&i)))
    }
}

/// Reads a whole program.
///
/// # Errors
/// For what cannot be a declaration, and for declarations that Metal does not have.
pub(super) fn read(reader: &Reader<'_>) -> Checked<Declarations> {
    let mut parser = Parser { reader, declarations: Declarations::default() };
    parser.scope(0..reader.tokens.len())?;
    Ok(parser.declarations)
}

struct Parser<'r, 'a> {
    reader: &'r Reader<'a>,
    declarations: Declarations,
}

/// The lists of template parameters before a declaration.
struct TemplateHeader {
    is_template: bool,
    type_parameters: Vec<String>,
    /// The index after them.
    end: usize,
}

/// A declaration up to its body or its `;`.
struct Head {
    /// The first token, template parameters included.
    start: usize,
    /// The first token after the template parameters.
    lead: usize,
    is_template: bool,
    /// The last `(` outside of other brackets and before a `=`.
    paren: Option<usize>,
    equals: Option<usize>,
    /// The `{` of the body or the `;`.
    end: usize,
}

impl Parser<'_, '_> {
    fn scope(&mut self, range: Range<usize>) -> Checked<()> {
        let mut i = range.start;
        while i < range.end {
            i = self.declaration(i, range.end)?;
        }
        Ok(())
    }

    /// Reads the declaration at `start`; the index after it.
    fn declaration(&mut self, start: usize, end: usize) -> Checked<usize> {
        if self.reader.tokens[start].kind == TokenKind::Directive || self.reader.is(start, ";") {
            return Ok(start + 1);
        }
        if self.reader.is(start, "namespace") {
            return self.namespace(start, end);
        }
        let header = self.template_header(start)?;
        let head = self.head(start, &header, end)?;
        let after = self.record(&head, end)?;
        for name in header.type_parameters {
            self.declarations.type_parameters.entry(name).or_default().push(start..after);
        }
        Ok(after)
    }

    /// `namespace a { ... }`, whose declarations are read, or `namespace a = b;`.
    fn namespace(&mut self, start: usize, end: usize) -> Checked<usize> {
        let open = (start..end).find(|&i| self.reader.is_any(i, &["{", ";"])).unwrap_or(end);
        if !self.reader.is(open, "{") {
            return Ok(open + 1);
        }
        let close = self.reader.closed(open)?;
        self.scope(open + 1..close - 1)?;
        Ok(close)
    }

    fn template_header(&self, start: usize) -> Checked<TemplateHeader> {
        let reader = self.reader;
        let mut header = TemplateHeader { is_template: false, type_parameters: Vec::new(), end: start };
        while reader.is(header.end, "template") && reader.is(header.end + 1, "<") {
            header.is_template = true;
            let Some(close) = reader.angle_closed(header.end + 1) else {
                return reader.fail(header.end, "`template <` is never closed");
            };
            for parameter in reader.split(header.end + 2..close - 1)? {
                if reader.is_any(parameter.start, &["typename", "class"]) {
                    // The dots of `typename... T` are no word.
                    let name = (parameter.start + 1..parameter.end).find_map(|i| reader.word(i));
                    header.type_parameters.extend(name.map(str::to_owned));
                }
            }
            header.end = close;
        }
        Ok(header)
    }

    fn head(&self, start: usize, header: &TemplateHeader, end: usize) -> Checked<Head> {
        let reader = self.reader;
        let lead = header.end;
        let mut head =
            Head { start, lead, is_template: header.is_template, paren: None, equals: None, end: lead };
        while head.end < end && !reader.is(head.end, ";") {
            match reader.tokens[head.end].text {
                "{" if head.equals.is_none() => break,
                "=" if head.equals.is_none() => head.equals = Some(head.end),
                "(" if head.equals.is_none() => head.paren = Some(head.end),
                _ => {}
            }
            head.end = match reader.tokens[head.end].text {
                "(" | "[" | "{" => reader.closed(head.end)?,
                _ => head.end + 1,
            };
        }
        if head.end >= end {
            return reader.fail(start, "the declaration that starts here does not end");
        }
        Ok(head)
    }

    fn record(&mut self, head: &Head, end: usize) -> Checked<usize> {
        let reader = self.reader;
        match reader.tokens[head.lead].text {
            "struct" | "class" | "enum" | "union" => return self.type_definition(head, end),
            "using" if reader.is(head.lead + 2, "=") => {
                self.declarations.types.extend(reader.word(head.lead + 1).map(str::to_owned));
            }
            "typedef" => self.declarations.types.extend(reader.word(head.end - 1).map(str::to_owned)),
            "using" | "static_assert" => {}
            "template" => self.instantiation(head)?,
            _ => {
                let is_operator = reader.contains(head.lead..head.end, "operator");
                match head.paren.filter(|_| head.equals.is_none() || is_operator) {
                    Some(paren) => return self.function(head, paren),
                    None => self.program_constant(head)?,
                }
            }
        }
        Ok(head.end + 1)
    }

    fn type_definition(&mut self, head: &Head, end: usize) -> Checked<usize> {
        let reader = self.reader;
        let is_scoped_enum = reader.is_any(head.lead + 1, &["class", "struct"]);
        let name_at = head.lead + if is_scoped_enum { 2 } else { 1 };
        self.declarations.types.extend(reader.word(name_at).map(str::to_owned));
        if !reader.is(head.end, "{") {
            return Ok(head.end + 1);
        }
        let close = reader.closed(head.end)?;
        if let Some(attribute) = reader.attributes_in(head.end, close - 1).first() {
            let name = &attribute.name;
            let message = format!("`[[{name}]]` in a struct: the stand-in has no argument buffers");
            return reader.fail_at(attribute, message);
        }
        self.declarations.type_bodies.push(head.end..close);
        // Variables of the type may be declared between the brace and the `;`.
        let semicolon = (close..end).find(|&i| reader.is(i, ";")).unwrap_or(end);
        Ok(semicolon + 1)
    }

    fn function(&mut self, head: &Head, paren: usize) -> Checked<usize> {
        let reader = self.reader;
        let close = reader.closed(paren)?;
        let has_body = reader.is(head.end, "{");
        let body = if has_body { head.end + 1..reader.closed(head.end)? - 1 } else { head.end..head.end };
        let of_parameters = reader.attributes_in(paren + 2, close - 1);
        let attributes: Vec<_> = reader
            .attributes_in(head.start, head.end)
            .into_iter()
            .filter(|a| !of_parameters.iter().any(|p| p.at == a.at))
            .collect();
        let is_kernel =
            reader.contains(head.lead..paren, "kernel") || attributes.iter().any(|a| a.name == "kernel");
        let after = if has_body { body.end } else { head.end } + 1;
        self.declarations.functions.push(Function {
            name: reader.word(paren.saturating_sub(1)).unwrap_or_default().into(),
            is_kernel,
            is_template: head.is_template,
            returns_void: paren >= 2 && reader.is(paren - 2, "void"),
            parameters: paren + 1..close - 1,
            body,
            attributes,
            at: head.start,
        });
        Ok(after)
    }

    fn program_constant(&mut self, head: &Head) -> Checked<()> {
        let (reader, start) = (self.reader, head.lead);
        if !reader.contains(start..head.end, "constant") {
            return reader
                .fail(start, "a variable at program scope must be in constant memory: write `constant`");
        }
        let declarator = start..head.equals.unwrap_or(head.end);
        let name_at = reader.declared_name(declarator.clone());
        let Some(name) = reader.word(name_at) else { return reader.fail(start, "the constant has no name") };
        let index = self.function_constant_index(start, head.end)?;
        match (index, head.equals) {
            (Some(_), Some(_)) => {
                return reader.fail(start, format!("function constant `{name}` has an initializer"));
            }
            (None, None) => {
                let message = format!("constant `{name}` has neither a value nor `[[function_constant(n)]]`");
                return reader.fail(start, message);
            }
            _ => {}
        }
        if (start..name_at).any(|i| reader.is_any(i, &["*", "&"])) {
            return reader.fail(start, format!("constant `{name}` is a pointer or a reference"));
        }
        let type_name: Vec<_> = (start..name_at)
            .map(|i| reader.tokens[i].text)
            .filter(|word| !["constant", "constexpr", "const", "static"].contains(word))
            .collect();
        self.declarations.constants.push(ProgramConstant {
            name: name.into(),
            index,
            type_name: type_name.join(" "),
            tokens: start..head.end + 1,
            initializer: head.equals.map(|equals| equals + 1..head.end),
            is_array: reader.contains(declarator, "["),
            is_constexpr: reader.contains(start..name_at, "constexpr"),
        });
        Ok(())
    }

    /// The number of the `[[function_constant(n)]]` among the attributes of a constant.
    fn function_constant_index(&self, start: usize, end: usize) -> Checked<Option<u32>> {
        let mut index = None;
        for attribute in self.reader.attributes_in(start, end) {
            match (attribute.name.as_str(), attribute.number::<u32>()) {
                ("function_constant", Some(n)) if n <= 65535 => index = Some(n),
                ("function_constant", _) => {
                    let message = "`[[function_constant(n)]]` needs a number from 0 to 65535";
                    return self.reader.fail_at(&attribute, message);
                }
                ("maybe_unused" | "unused", _) => {}
                (other, _) => {
                    return self
                        .reader
                        .fail_at(&attribute, format!("`[[{other}]]` cannot apply to a constant"));
                }
            }
        }
        Ok(index)
    }

    /// `template [[host_name("x")]] [[kernel]] decltype(f<float>) f<float>;`, or the same with a signature.
    fn instantiation(&mut self, head: &Head) -> Checked<()> {
        let reader = self.reader;
        // The name is outside of `decltype(...)` and of the parameters.
        let open = reader.find(head.lead + 1, head.end, "<")?;
        if open == head.end {
            let message = "an explicit instantiation needs template arguments, such as `f<float>`";
            return reader.fail(head.start, message);
        }
        let Some(close) = reader.angle_closed(open) else {
            return reader.fail(open, "`<` is never closed");
        };
        let attributes = reader.attributes_in(head.start, open);
        let host_name = attributes.iter().find(|a| a.name == "host_name").and_then(|a| a.argument.as_deref());
        let is_kernel =
            attributes.iter().any(|a| a.name == "kernel") || reader.contains(head.lead..open, "kernel");
        if let Some(other) = attributes.iter().find(|a| !["kernel", "host_name"].contains(&a.name.as_str())) {
            let message = format!("`[[{}]]` cannot apply to an instantiation", other.name);
            return reader.fail_at(other, message);
        }
        self.declarations.instantiations.push(Instantiation {
            call: reader.text(open - 1..close),
            template: reader.word(open - 1).unwrap_or_default().to_owned(),
            host_name: host_name.map(|name| name.trim_matches('"').to_owned()),
            is_kernel,
            at: head.start,
        });
        Ok(())
    }
}
