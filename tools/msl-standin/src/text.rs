//! What is known of a text before the compiler sees it: its kernels, and what it says that C++ cannot.
//!
//! The text is cut into tokens, checked, and edited in place: every line keeps its number.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Word,
    Number,
    Text,
    Mark,
    Directive,
}

#[derive(Clone, Copy, Debug)]
struct Token<'a> {
    kind: Kind,
    text: &'a str,
    at: usize,
}

impl Token<'_> {
    fn end(&self) -> usize {
        self.at + self.text.len()
    }
}

/// What is wrong, and in which line.
#[derive(Clone, Debug)]
pub(crate) struct Complaint {
    pub(crate) line: usize,
    pub(crate) what: String,
}

type Checked<T> = Result<T, Complaint>;

/// How a parameter of a kernel gets its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The buffer of this index, if the function constant (by name) is true.
    Buffer(usize, Option<String>),
    Threadgroup(usize),
    /// A builtin of up to three components, by its name in the context.
    Vector(String),
    /// A builtin of one component.
    Scalar(String),
}

#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    /// What the host calls it.
    pub(crate) name: String,
    /// What C++ calls it, template arguments included.
    pub(crate) call: String,
    pub(crate) parameters: Vec<Source>,
    pub(crate) max_threads: Option<u32>,
    /// Function constants that it reaches, by name.
    pub(crate) constants: BTreeSet<String>,
    pub(crate) line: usize,
}

#[derive(Clone, Debug)]
pub(crate) struct Constant {
    pub(crate) name: String,
    pub(crate) index: u32,
    pub(crate) type_name: String,
    /// The text asks whether it is set, so that it need not be.
    pub(crate) optional: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Parsed {
    /// What the compiler gets.
    pub(crate) text: String,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) constants: Vec<Constant>,
}

const SPACES: [&str; 4] = ["device", "constant", "threadgroup", "thread"];

const SCALARS: [&str; 27] = [
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "bfloat",
    "float",
    "size_t",
    "ptrdiff_t",
    "int8_t",
    "uint8_t",
    "int16_t",
    "uint16_t",
    "int32_t",
    "uint32_t",
    "int64_t",
    "uint64_t",
    "void",
    "unsigned",
    "signed",
    "uintptr_t",
    "intptr_t",
];

const VECTOR_OF: [&str; 11] =
    ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"];

const LIBRARY_TYPES: [&str; 12] = [
    "atomic_int",
    "atomic_uint",
    "atomic_bool",
    "atomic_float",
    "atomic_ulong",
    "simdgroup_float8x8",
    "simdgroup_half8x8",
    "simdgroup_bfloat8x8",
    "mem_flags",
    "simd_vote",
    "memory_order",
    "true_type",
];

const HEADERS: [&str; 14] = [
    "metal_stdlib",
    "metal_simdgroup",
    "metal_simdgroup_matrix",
    "metal_atomic",
    "metal_math",
    "metal_common",
    "metal_integer",
    "metal_compute",
    "metal_types",
    "metal_relational",
    "metal_geometric",
    "metal_type_traits",
    "metal_limits",
    "metal_array",
];

const VECTOR_INPUTS: [&str; 6] = [
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
];

const SCALAR_INPUTS: [&str; 5] = [
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
];

/// Words that kernels may not use, and why.
fn banned(word: &str) -> Option<&'static str> {
    Some(match word {
        "double" => "Metal has no double",
        "goto" => "Metal has no goto",
        "new" | "delete" => "Metal has no memory to allocate",
        "throw" | "try" | "catch" => "Metal has no exceptions",
        "virtual" => "Metal has no virtual functions",
        "typeid" | "dynamic_cast" => "Metal has no run-time type information",
        "thread_local" => "Metal has no thread_local",
        "asm" => "Metal has no inline assembly",
        "vertex" | "fragment" | "mesh" => {
            "the stand-in knows compute kernels alone, and the word is reserved"
        }
        "co_await" | "co_yield" | "co_return" => "Metal has no coroutines",
        _ if word.starts_with("msl_") || word.starts_with("MSL_") => "such names belong to the stand-in",
        _ if word.starts_with("opencl_") => "that is not Metal",
        _ if word.contains("__")
            && !["__METAL_VERSION__", "__HAVE_BFLOAT__", "__FILE__", "__LINE__"].contains(&word) =>
        {
            "names with two underscores are reserved"
        }
        _ => return None,
    })
}

/// Words that mean something to the language of the stand-in and nothing to Metal.
const FOREIGN: [&str; 12] = [
    "global",
    "local",
    "generic",
    "pipe",
    "event_t",
    "vec_step",
    "queue_t",
    "clk_event_t",
    "ndrange_t",
    "reserve_id_t",
    "read_only",
    "write_only",
];

/// Whether the text needs the preprocessor before it can be read.
pub(crate) fn needs_preprocessor(text: &str) -> bool {
    text.lines().any(|line| {
        let line = line.trim_start();
        line.strip_prefix('#').is_some_and(|d| {
            let d = d.trim_start();
            ["define", "if", "undef", "el", "end", "error", "warning"].iter().any(|w| d.starts_with(w))
        })
    })
}

/// Takes the includes out of a text; says which are not known and whether there is a first one.
pub(crate) fn take_includes(text: &str) -> Checked<String> {
    let mut out = String::with_capacity(text.len());
    let mut found = false;
    for (i, line) in text.lines().enumerate() {
        let bare = line.trim_start();
        let include = bare.strip_prefix('#').and_then(|d| d.trim_start().strip_prefix("include"));
        if let Some(rest) = include {
            let name = rest.trim().strip_prefix('<').and_then(|r| r.split('>').next()).unwrap_or(rest.trim());
            if !HEADERS.contains(&name) {
                return Err(Complaint {
                    line: i + 1,
                    what: format!("#include {name}: the stand-in has no such header"),
                });
            }
            found |= name == "metal_stdlib";
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    if !found {
        return Err(Complaint { line: 1, what: "the text does not #include <metal_stdlib>".into() });
    }
    Ok(out)
}

/// Cuts a text into tokens; comments are dropped.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let b = text.as_bytes();
    let word = |c: u8| c.is_ascii_alphanumeric() || c == b'_' || c >= 0x80;
    let mut out = Vec::new();
    let mut i = 0;
    let mut line_start = true;
    while i < b.len() {
        let start = i;
        let next = b.get(i + 1).copied().unwrap_or(0);
        let kind = match b[i] {
            b'\n' => {
                line_start = true;
                i += 1;
                continue;
            }
            c if c.is_ascii_whitespace() => {
                i += 1;
                continue;
            }
            b'/' if next == b'/' => {
                while i < b.len() && b[i] != b'\n' {
                    i += 1;
                }
                continue;
            }
            b'/' if next == b'*' => {
                i += 2;
                while i < b.len() && !(b[i] == b'*' && b.get(i + 1) == Some(&b'/')) {
                    i += 1;
                }
                i = (i + 2).min(b.len());
                continue;
            }
            b'#' if line_start => {
                while i < b.len() && (b[i] != b'\n' || b[i - 1] == b'\\') {
                    i += 1;
                }
                Kind::Directive
            }
            q @ (b'"' | b'\'') => {
                i += 1;
                while i < b.len() && b[i] != q && b[i] != b'\n' {
                    i += if b[i] == b'\\' { 2 } else { 1 };
                }
                i = (i + 1).min(b.len());
                Kind::Text
            }
            c if c.is_ascii_digit() || (c == b'.' && next.is_ascii_digit()) => {
                while i < b.len()
                    && (word(b[i])
                        || b[i] == b'.'
                        || (matches!(b[i], b'+' | b'-')
                            && (matches!(b[i - 1], b'p' | b'P')
                                || (matches!(b[i - 1], b'e' | b'E') && !text[start..i].starts_with("0x")))))
                {
                    i += 1;
                }
                Kind::Number
            }
            c if word(c) => {
                while i < b.len() && word(b[i]) {
                    i += 1;
                }
                Kind::Word
            }
            b':' if next == b':' => {
                i += 2;
                Kind::Mark
            }
            b'[' if next == b'[' => {
                i += 2;
                Kind::Mark
            }
            b'-' if next == b'>' => {
                i += 2;
                Kind::Mark
            }
            b'&' | b'|' | b'=' if next == b[i] => {
                i += 2;
                Kind::Mark
            }
            _ => {
                i += 1;
                Kind::Mark
            }
        };
        line_start = false;
        out.push(Token { kind, text: &text[start..i], at: start });
    }
    out
}

/// An edit of the text: a range of bytes and what takes its place.
type Edit = (usize, usize, String);

struct Reader<'a> {
    text: &'a str,
    tokens: Vec<Token<'a>>,
    /// Byte at which each line starts, and the number that the preprocessor says the line has.
    lines: Vec<(usize, usize)>,
    edits: Vec<Edit>,
    /// Attributes taken out, by the index of the token that follows them.
    attributes: BTreeMap<usize, Vec<Attribute>>,
    vectors: HashSet<String>,
}

#[derive(Clone, Debug)]
struct Attribute {
    name: String,
    argument: Option<String>,
    at: usize,
}

/// A function or an instantiation as it stands in the text: ranges of tokens.
struct Function {
    name: String,
    is_kernel: bool,
    is_template: bool,
    parameters: (usize, usize),
    body: (usize, usize),
    attributes: Vec<Attribute>,
    at: usize,
    returns_void: bool,
}

struct Instantiation {
    call: String,
    base: String,
    host_name: Option<String>,
    is_kernel: bool,
    at: usize,
}

#[derive(Default)]
struct Items {
    functions: Vec<Function>,
    instantiations: Vec<Instantiation>,
    types: HashSet<String>,
    /// Names of type parameters, and the tokens that each is a type in.
    parameters: HashMap<String, Vec<Range<usize>>>,
    /// Name, function constant's index if it is one, type, initialiser, whether an array or a vector or a struct.
    constants: Vec<ProgramConstant>,
}

struct ProgramConstant {
    name: String,
    index: Option<u32>,
    type_name: String,
    tokens: (usize, usize),
    initialiser: Option<(usize, usize)>,
    is_array: bool,
    is_constexpr: bool,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        let mut lines = Vec::new();
        let mut at = 0;
        let mut number = 1;
        for line in text.split_inclusive('\n') {
            lines.push((at, number));
            // `# 12 "file"`, as the preprocessor writes it: the number of the next line.
            let marked =
                line.strip_prefix("# ").and_then(|r| r.split(' ').next()).and_then(|n| n.parse().ok());
            number = marked.unwrap_or(number + 1);
            at += line.len();
        }
        let vectors = VECTOR_OF.iter().flat_map(|t| (2..=4).map(move |n| format!("{t}{n}"))).collect();
        Self { text, tokens: tokens(text), lines, edits: Vec::new(), attributes: BTreeMap::new(), vectors }
    }

    fn line(&self, at: usize) -> usize {
        let i = self.lines.partition_point(|&(start, _)| start <= at);
        self.lines.get(i.saturating_sub(1)).map_or(1, |l| l.1)
    }

    fn fail<T>(&self, token: usize, what: impl Into<String>) -> Checked<T> {
        let at = self.tokens.get(token).or(self.tokens.last()).map_or(0, |t| t.at);
        Err(Complaint { line: self.line(at), what: what.into() })
    }

    fn is(&self, i: usize, text: &str) -> bool {
        self.tokens.get(i).is_some_and(|t| t.text == text)
    }

    /// Whether token `i` is between the parentheses that follow `name`.
    fn within(&self, i: usize, name: &str) -> bool {
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

    fn word(&self, i: usize) -> Option<&'a str> {
        self.tokens.get(i).filter(|t| t.kind == Kind::Word).map(|t| t.text)
    }

    fn replace(&mut self, from: usize, to: usize, with: impl Into<String>) {
        let (a, b) = (self.tokens[from].at, self.tokens[to - 1].end());
        // Lines keep their numbers: what is taken out leaves its line ends.
        let mut with = with.into();
        with.extend(self.text[a..b].chars().filter(|&c| c == '\n'));
        self.edits.push((a, b, with));
    }

    fn insert(&mut self, before: usize, what: &str) {
        let at = self.tokens[before].at;
        self.edits.push((at, at, what.into()));
    }

    fn source(&self, range: (usize, usize)) -> String {
        if range.0 >= range.1 {
            return String::new();
        }
        self.text[self.tokens[range.0].at..self.tokens[range.1 - 1].end()].replace('\n', " ")
    }

    /// The token after the bracket that closes the one at `open`.
    fn closed(&self, open: usize) -> Checked<usize> {
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

    /// The token after the `>` that closes the `<` at `open`, if it is that of template arguments.
    fn angle_closed(&self, open: usize) -> Option<usize> {
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

    /// Ranges of tokens between commas, brackets and template arguments kept together.
    fn split(&self, from: usize, to: usize) -> Checked<Vec<(usize, usize)>> {
        let mut parts = Vec::new();
        let (mut start, mut i) = (from, from);
        while i < to {
            match self.tokens[i].text {
                "(" | "[" | "{" => i = self.closed(i)?,
                "<" => i = self.angle_closed(i).filter(|&e| e <= to).unwrap_or(i + 1),
                "," => {
                    parts.push((start, i));
                    i += 1;
                    start = i;
                }
                _ => i += 1,
            }
        }
        if start < to || !parts.is_empty() {
            parts.push((start, to));
        }
        Ok(parts)
    }

    // ---- words and attributes

    fn check_words(&mut self) -> Checked<()> {
        for i in 0..self.tokens.len() {
            let token = self.tokens[i];
            match token.kind {
                Kind::Word => {
                    if let Some(why) = banned(token.text) {
                        return self.fail(i, format!("`{}`: {why}", token.text));
                    }
                    if token.text == "std" && self.is(i + 1, "::") {
                        return self.fail(i, "`std::`: Metal has no C++ standard library");
                    }
                    if token.text == "long" && self.is(i + 1, "long") {
                        return self.fail(i, "`long long`: Metal has no such type, and long has 64 bits");
                    }
                    let member = i > 0 && matches!(self.tokens[i - 1].text, "." | "->");
                    let foreign = FOREIGN.contains(&token.text)
                        || (token.text == "private" && !self.is(i + 1, ":"))
                        || token.text.starts_with("convert_");
                    if foreign {
                        self.replace(i, i + 1, format!("user_{}", token.text));
                    }
                    if SPACES.contains(&token.text) && member {
                        return self.fail(i, format!("`{}` is a word of the language", token.text));
                    }
                }
                Kind::Number => {
                    let t = token.text.to_ascii_lowercase();
                    if let Some(digits) =
                        t.strip_suffix("bf").filter(|_| !t.starts_with("0x") || t.contains('p'))
                    {
                        self.replace(i, i + 1, format!("((bfloat){digits}f)"));
                    } else if t.ends_with("ll") || t.ends_with("llu") {
                        return self.fail(i, format!("`{}`: Metal has no long long", token.text));
                    } else if t.ends_with('l') && t.contains('.') && !t.starts_with("0x") {
                        return self.fail(i, format!("`{}`: Metal has no long double", token.text));
                    }
                }
                Kind::Text if token.text.starts_with('"') => {
                    let named = i >= 2 && matches!(self.tokens[i - 2].text, "host_name" | "_Pragma");
                    if !named && !self.within(i, "static_assert") {
                        return self.fail(i, "a string: kernels have no use for one");
                    }
                }
                Kind::Mark if token.text == "[" => {
                    let opens =
                        i > 0 && matches!(self.tokens[i - 1].text, "=" | "(" | "," | "return" | "{" | ";");
                    if opens && !self.is(i + 1, "[") {
                        return self.fail(i, "a lambda: Metal has none");
                    }
                }
                Kind::Directive => {
                    let d = token.text[1..].trim_start();
                    let marker = d.starts_with(|c: char| c.is_ascii_digit());
                    if !(marker || d.starts_with("pragma") || d.starts_with("line")) {
                        return self.fail(i, format!("`{}`: this directive is not known", token.text));
                    }
                    let pragma = d.strip_prefix("pragma").map_or("", str::trim_start);
                    if d.starts_with("pragma") && pragma.starts_with("OPENCL") {
                        return self.fail(i, "`#pragma OPENCL` is not Metal");
                    }
                    if pragma.starts_with("METAL") {
                        self.replace(i, i + 1, "");
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes every `[[...]]` out of the text and of the tokens.
    fn take_attributes(&mut self) -> Checked<()> {
        let mut kept = Vec::with_capacity(self.tokens.len());
        let mut attributes: BTreeMap<usize, Vec<Attribute>> = BTreeMap::new();
        let mut i = 0;
        while i < self.tokens.len() {
            if !self.is(i, "[[") {
                kept.push(self.tokens[i]);
                i += 1;
                continue;
            }
            let end = self.closed(i)?;
            for (a, b) in self.split(i + 1, end - 2)? {
                let Some(mut name) = self.word(a) else { return self.fail(a, "an attribute has a name") };
                let mut at = a;
                if name == "clang" || name == "metal" || name == "gnu" {
                    if !self.is(a + 1, "::") {
                        return self.fail(a, format!("`[[{name}]]`: this attribute is not known"));
                    }
                    at = a + 2;
                    name = self.word(at).unwrap_or_default();
                }
                let argument = (self.is(at + 1, "(") && b > at + 3).then(|| self.source((at + 2, b - 1)));
                attributes.entry(kept.len()).or_default().push(Attribute {
                    name: name.into(),
                    argument,
                    at: a,
                });
                let known = [
                    "kernel",
                    "host_name",
                    "max_total_threads_per_threadgroup",
                    "function_constant",
                    "buffer",
                ]
                .contains(&name)
                    || ["threadgroup", "maybe_unused", "unused", "always_inline", "noinline", "fallthrough"]
                        .contains(&name)
                    || VECTOR_INPUTS.contains(&name)
                    || SCALAR_INPUTS.contains(&name);
                if !known {
                    return self.fail(a, format!("`[[{name}]]`: this attribute is not known"));
                }
            }
            self.replace(i, end, "");
            i = end;
        }
        // An attribute's token is named by where it stood; errors need its place in the text.
        for list in attributes.values_mut() {
            for a in list {
                a.at = self.tokens[a.at].at;
            }
        }
        self.tokens = kept;
        self.attributes = attributes;
        Ok(())
    }

    /// Attributes that stood before tokens `from` (or after the one before it) up to `to`.
    fn attributes_in(&self, from: usize, to: usize) -> Vec<Attribute> {
        self.attributes.range(from..=to.max(from)).flat_map(|(_, a)| a.iter().cloned()).collect()
    }

    fn fail_at<T>(&self, attribute: &Attribute, what: impl Into<String>) -> Checked<T> {
        Err(Complaint { line: self.line(attribute.at), what: what.into() })
    }

    // ---- items at program scope

    fn items(&mut self, mut i: usize, end: usize, items: &mut Items) -> Checked<()> {
        while i < end {
            i = self.item(i, end, items)?;
        }
        Ok(())
    }

    fn item(&mut self, start: usize, end: usize, items: &mut Items) -> Checked<usize> {
        let mut parameters = Vec::new();
        let after = self.item_with(start, end, items, &mut parameters)?;
        for name in parameters {
            items.parameters.entry(name).or_default().push(start..after);
        }
        Ok(after)
    }

    fn item_with(
        &mut self,
        start: usize,
        end: usize,
        items: &mut Items,
        parameters: &mut Vec<String>,
    ) -> Checked<usize> {
        let mut i = start;
        let first = self.tokens[i].text;
        if self.tokens[i].kind == Kind::Directive || first == ";" {
            return Ok(i + 1);
        }
        if first == "namespace" {
            while i < end && !self.is(i, "{") && !self.is(i, ";") {
                i += 1;
            }
            if self.is(i, "{") {
                let close = self.closed(i)?;
                self.items(i + 1, close - 1, items)?;
                return Ok(close);
            }
            return Ok(i + 1);
        }
        let mut is_template = false;
        while self.is(i, "template") && self.is(i + 1, "<") {
            is_template = true;
            let Some(close) = self.angle_closed(i + 1) else {
                return self.fail(i, "`template <` is never closed");
            };
            for (a, b) in self.split(i + 2, close - 1)? {
                if matches!(self.tokens[a].text, "typename" | "class") {
                    // `typename... T` too.
                    let name = (a + 1..b).find_map(|k| self.word(k));
                    parameters.extend(name.map(str::to_owned));
                }
            }
            i = close;
        }
        // The head: up to the `;` that ends the item or the `{` of its body.
        let mut open = i;
        let mut equals = None;
        let mut paren = None;
        while open < end && !self.is(open, ";") {
            match self.tokens[open].text {
                "{" if equals.is_none() => break,
                "=" if equals.is_none() => equals = Some(open),
                _ => {}
            }
            if matches!(self.tokens[open].text, "(" | "[" | "{") {
                if self.is(open, "(") && equals.is_none() {
                    paren = Some(open);
                }
                open = self.closed(open)?;
            } else {
                open += 1;
            }
        }
        if open >= end {
            return self.fail(start, "what starts here has no end");
        }
        let head = |r: &Self, w: &str| (i..open).any(|k| r.is(k, w));
        let lead = self.tokens[i].text;
        if matches!(lead, "struct" | "class" | "enum" | "union") {
            let name_at = if self.is(i + 1, "class") || self.is(i + 1, "struct") { i + 2 } else { i + 1 };
            items.types.extend(self.word(name_at).map(str::to_owned));
            if self.is(open, "{") {
                let close = self.closed(open)?;
                if let Some(a) = self.attributes_in(open, close - 1).first() {
                    return self.fail_at(
                        a,
                        format!("`[[{}]]` in a struct: the stand-in has no argument buffers", a.name),
                    );
                }
                // A constant of a struct: `static constant constexpr`.
                for k in open..close {
                    let near = |w: &str| (k.saturating_sub(3)..k + 3).any(|n| self.is(n, w));
                    if self.is(k, "constant") && near("static") {
                        self.replace(k, k + 1, "const __global");
                    }
                    if self.is(k, "constant") && self.qualifies_member(k) {
                        self.edit_constant_member(k)?;
                    }
                }
                open = close;
                while open < end && !self.is(open, ";") {
                    open += 1;
                }
            }
            return Ok(open + 1);
        }
        if lead == "using" {
            if self.is(i + 2, "=") {
                items.types.extend(self.word(i + 1).map(str::to_owned));
            }
            return Ok(open + 1);
        }
        if lead == "typedef" {
            items.types.extend(self.word(open - 1).map(str::to_owned));
            return Ok(open + 1);
        }
        if lead == "static_assert" {
            return Ok(open + 1);
        }
        if lead == "template" {
            self.instantiation(start, i, open, items)?;
            return Ok(open + 1);
        }
        if let Some(paren) = paren.filter(|_| equals.is_none() || head(self, "operator")) {
            let close = self.closed(paren)?;
            let body = if self.is(open, "{") { (open + 1, self.closed(open)? - 1) } else { (open, open) };
            let attributes = self.attributes_in(start, body.0.min(open));
            let of_parameters = self.attributes_in(paren + 2, close - 1);
            let own: Vec<_> =
                attributes.into_iter().filter(|a| !of_parameters.iter().any(|p| p.at == a.at)).collect();
            let is_kernel =
                (i..paren).any(|k| self.is(k, "kernel")) || own.iter().any(|a| a.name == "kernel");
            items.functions.push(Function {
                name: self.word(paren.saturating_sub(1)).unwrap_or_default().into(),
                is_kernel,
                is_template,
                parameters: (paren + 1, close - 1),
                body,
                attributes: own,
                at: start,
                returns_void: paren >= 2 && self.is(paren - 2, "void"),
            });
            return Ok(if self.is(open, "{") { body.1 + 1 } else { open + 1 });
        }
        self.program_constant(i, open, equals, items)?;
        Ok(open + 1)
    }

    /// Whether the address space at `k` stands behind the parameters of a member function.
    fn qualifies_member(&self, k: usize) -> bool {
        let before = if self.is(k - 1, "const") { k - 2 } else { k - 1 };
        let after = if self.is(k + 1, "const") { k + 2 } else { k + 1 };
        self.is(before, ")") && (self.is(after, "{") || self.is(after, ";"))
    }

    /// A member function of objects in constant memory: the language of the stand-in has no word for that space where a function's goes,
    /// so that all of the function speaks of the one around it.
    fn edit_constant_member(&mut self, k: usize) -> Checked<()> {
        let body = if self.is(k + 1, "const") { k + 2 } else { k + 1 };
        let end = if self.is(body, "{") { self.closed(body)? } else { body };
        let starts = |i: usize| matches!(self.tokens[i].text, ";" | "{" | "}" | ":");
        let from = (0..k).rev().find(|&i| starts(i)).map_or(0, |i| i + 1);
        for i in from..end {
            if self.is(i, "constant") {
                self.replace(i, i + 1, "const __global");
            }
        }
        Ok(())
    }

    fn program_constant(
        &mut self,
        i: usize,
        end: usize,
        equals: Option<usize>,
        items: &mut Items,
    ) -> Checked<()> {
        if !(i..end).any(|k| self.is(k, "constant")) {
            return self
                .fail(i, "a variable at program scope has to be in constant memory: write `constant`");
        }
        let declared = equals.unwrap_or(end);
        let is_array = (i..declared).any(|k| self.is(k, "["));
        let name_at = (i..declared).find(|&k| self.is(k, "[")).unwrap_or(declared) - 1;
        let Some(name) = self.word(name_at) else { return self.fail(i, "the constant has no name") };
        let attributes = self.attributes_in(i, end);
        let mut index = None;
        for a in &attributes {
            let number = a.argument.as_deref().and_then(|n| n.trim().parse::<u32>().ok());
            match (a.name.as_str(), number) {
                ("function_constant", Some(n)) if n <= 65535 => index = Some(n),
                ("function_constant", _) => {
                    return self.fail_at(a, "`[[function_constant(n)]]` needs a number up to 65535");
                }
                ("maybe_unused" | "unused", _) => {}
                (other, _) => return self.fail_at(a, format!("`[[{other}]]` does not belong to a constant")),
            }
        }
        if index.is_some() && equals.is_some() {
            return self.fail(i, format!("function constant `{name}` has an initialiser"));
        }
        if index.is_none() && equals.is_none() {
            return self.fail(i, format!("constant `{name}` has no value and no `[[function_constant(n)]]`"));
        }
        if (i..name_at).any(|k| self.is(k, "*") || self.is(k, "&")) {
            return self.fail(i, format!("constant `{name}` is a pointer or a reference"));
        }
        let type_name: Vec<_> = (i..name_at)
            .map(|k| self.tokens[k].text)
            .filter(|t| !["constant", "constexpr", "const", "static"].contains(t))
            .collect();
        let is_constexpr = (i..name_at).any(|k| self.is(k, "constexpr"));
        items.constants.push(ProgramConstant {
            name: name.into(),
            index,
            type_name: type_name.join(" "),
            tokens: (i, end + 1),
            initialiser: equals.map(|e| (e + 1, end)),
            is_array,
            is_constexpr,
        });
        Ok(())
    }

    /// `template [[host_name("x")]] [[kernel]] decltype(f<float>) f<float>;` or the same with a signature.
    fn instantiation(&mut self, start: usize, i: usize, end: usize, items: &mut Items) -> Checked<()> {
        let mut angle = end;
        let mut k = i + 1;
        while k < end {
            match self.tokens[k].text {
                // `decltype(...)` and parameters are not where the name is.
                "(" => k = self.closed(k)?,
                "<" if angle == end => {
                    angle = k;
                    let Some(after) = self.angle_closed(k) else {
                        return self.fail(k, "`<` is never closed");
                    };
                    k = after;
                }
                _ => k += 1,
            }
        }
        if angle == end || angle <= i {
            return self.fail(start, "an explicit instantiation needs template arguments: `f<float>`");
        }
        let close = self.angle_closed(angle).unwrap_or(end);
        let base = self.word(angle - 1).unwrap_or_default().to_owned();
        let attributes = self.attributes_in(start, angle);
        let host_name = attributes.iter().find(|a| a.name == "host_name");
        let host_name = host_name.and_then(|a| a.argument.as_deref()).map(|n| n.trim_matches('"').to_owned());
        let is_kernel =
            attributes.iter().any(|a| a.name == "kernel") || (i..angle).any(|k| self.is(k, "kernel"));
        for a in &attributes {
            if !["kernel", "host_name"].contains(&a.name.as_str()) {
                return self.fail_at(a, format!("`[[{}]]` does not belong to an instantiation", a.name));
            }
        }
        items.instantiations.push(Instantiation {
            call: self.source((angle - 1, close)),
            base,
            host_name,
            is_kernel,
            at: start,
        });
        Ok(())
    }

    // ---- what C++ would let pass

    /// Each pointer and reference says where it points: `*` and `&` after a type need an address space before it.
    fn check_pointers(&self, items: &Items) -> Checked<()> {
        let own = |i: usize, w: &str| {
            let inside = |of: &Vec<Range<usize>>| of.iter().any(|range| range.contains(&i));
            items.types.contains(w) || items.parameters.get(w).is_some_and(inside)
        };
        let is_type = |i: usize| {
            self.word(i).is_some_and(|w| {
                let member = i > 0 && matches!(self.tokens[i - 1].text, "." | "->");
                !member
                    && (SCALARS.contains(&w)
                        || LIBRARY_TYPES.contains(&w)
                        || self.vectors.contains(w)
                        || w.strip_prefix("packed_").is_some_and(|p| self.vectors.contains(p))
                        || own(i, w))
            })
        };
        for i in 1..self.tokens.len() {
            if !matches!(self.tokens[i].text, "*" | "&" | "&&") {
                continue;
            }
            // Back over `const` to what stands before the mark.
            let mut k = i - 1;
            while k > 0 && matches!(self.tokens[k].text, "const" | "volatile") {
                k -= 1;
            }
            let mut named = None;
            if is_type(k) {
                named = Some(k);
            } else if self.is(k, ">") {
                // `vec<float, 4>*`: back to the word before the `<` that opens it.
                let mut depth = 0;
                let mut j = k;
                loop {
                    match self.tokens[j].text {
                        ">" => depth += 1,
                        "<" => depth -= 1,
                        ";" | "{" | "}" => break,
                        _ => {}
                    }
                    if depth == 0 || j == 0 {
                        break;
                    }
                    j -= 1;
                }
                let generic = j > 0
                    && self.is(j, "<")
                    && self.word(j - 1).is_some_and(|w| {
                        ["vec", "simdgroup_matrix", "atomic", "array", "packed_vec"].contains(&w)
                            || own(j - 1, w)
                    });
                if generic {
                    named = Some(j - 1);
                }
            } else if k < i - 1 && matches!(self.tokens[k].text, "*" | "(" | ",") {
                // `* const *`.
                if self.is(k, "*") {
                    named = Some(k);
                }
            } else if self.is(k, "*") && k > 0 && (is_type(k - 1) || self.is(k - 1, "const")) {
                return self.fail(
                    i,
                    "a pointer to a pointer names the address space of both: `device float* thread*`",
                );
            }
            let Some(named) = named else { continue };
            let mut j = named;
            let mut found = (named + 1..i).any(|k| SPACES.contains(&self.tokens[k].text));
            while j > 0 && !found {
                j -= 1;
                let t = self.tokens[j].text;
                if SPACES.contains(&t) {
                    found = true;
                } else if !([
                    "const",
                    "volatile",
                    "unsigned",
                    "signed",
                    "::",
                    "metal",
                    "struct",
                    "typename",
                    "constexpr",
                    "static",
                    "inline",
                ]
                .contains(&t)
                    || is_type(j))
                {
                    break;
                }
            }
            if !found {
                let what = if self.is(i, "*") { "pointer" } else { "reference" };
                return self.fail(
                    i,
                    format!(
                        "a {what} to `{}` has no address space: write device, constant, threadgroup or thread",
                        self.tokens[named].text
                    ),
                );
            }
        }
        Ok(())
    }

    /// `float4(...)` and `vec<T, 4>(...)` are made by a function; `(float4)x` would reinterpret bits.
    fn edit_vectors(&mut self) -> Checked<()> {
        let mut i = 0;
        while i < self.tokens.len() {
            let Some(w) = self.word(i) else {
                i += 1;
                continue;
            };
            let packed = w.strip_prefix("packed_").is_some_and(|p| self.vectors.contains(p));
            let qualified = i >= 2 && self.is(i - 1, "::") && self.is(i - 2, "metal");
            let lead = if qualified { "" } else { "metal::" };
            let after =
                if w == "vec" && self.is(i + 1, "<") { self.angle_closed(i + 1) } else { Some(i + 1) };
            if let (true, Some(after)) = (self.vectors.contains(w) || w == "vec", after) {
                let member = i > 0 && matches!(self.tokens[i - 1].text, "." | "->");
                if self.is(after, "(") && !member && !packed {
                    self.insert(i, &format!("{lead}msl_make<metal::"));
                    self.insert(after, ">");
                } else if i > 0 && self.is(i - 1, "(") && self.is(after, ")") && i > 1 {
                    let before = self.tokens[i - 2];
                    let call = before.kind == Kind::Word && before.text != "return"
                        || matches!(before.text, ">" | "]" | ")");
                    let next = self.tokens.get(after + 1);
                    let operand =
                        next.is_some_and(|t| matches!(t.kind, Kind::Word | Kind::Number) || t.text == "(");
                    if operand && !call {
                        return self.fail(i, format!("a C-style cast to `{w}`: write `{w}(...)`"));
                    }
                } else if i >= 2 && self.is(i - 1, "<") && self.is(i - 2, "static_cast") {
                    return self.fail(i, format!("static_cast to `{w}`: write `{w}(...)`"));
                }
            }
            i += 1;
        }
        Ok(())
    }

    /// Where the `alignas(..)` before a token starts, and what it holds.
    fn alignment_before(&self, i: usize) -> Option<(usize, (usize, usize))> {
        if !self.is(i.checked_sub(1)?, ")") {
            return None;
        }
        let start = (0..i).rev().find(|&n| self.is(n, "alignas"))?;
        (self.is(start + 1, "(") && self.closed(start + 1).ok()? == i).then_some((start, (start + 2, i - 1)))
    }

    /// Threadgroup variables live in memory of the group, which the runner hands out.
    fn edit_threadgroup(&mut self, functions: &[Function]) -> Checked<()> {
        let mut id = 0;
        for f in functions {
            let (from, to) = f.body;
            for i in from..to {
                if !self.is(i, "threadgroup") {
                    continue;
                }
                let aligned = self.alignment_before(i);
                let start = aligned.map_or(i, |(start, _)| start);
                if !matches!(self.tokens[start - 1].text, ";" | "{" | "}") {
                    continue;
                }
                let mut end = i;
                while end < to && !self.is(end, ";") {
                    end = if matches!(self.tokens[end].text, "(" | "[" | "{") {
                        self.closed(end)?
                    } else {
                        end + 1
                    };
                }
                let mark = |m: &str| (i..end).any(|k| self.is(k, m));
                // A pointer or a reference to threadgroup memory is an ordinary variable.
                let declared = (i..end).find(|&k| self.is(k, "=") || self.is(k, "[")).unwrap_or(end);
                if (i..declared).any(|k| self.is(k, "*") || self.is(k, "&")) {
                    continue;
                }
                if !f.is_kernel {
                    return self.fail(i, "a threadgroup variable outside of a kernel: pass a pointer to it");
                }
                if mark("=") {
                    return self.fail(i, "a threadgroup variable has no initialiser");
                }
                let mut out = String::new();
                let mut base = String::new();
                let asked = aligned.map(|(_, inside)| self.source(inside));
                for (n, (a, b)) in self.split(i + 1, end)?.into_iter().enumerate() {
                    let name_at = (a..b).find(|&k| self.is(k, "[")).unwrap_or(b) - 1;
                    let Some(name) = self.word(name_at) else {
                        return self.fail(a, "the threadgroup variable has no name");
                    };
                    if n == 0 {
                        if name_at == a {
                            return self.fail(a, "the threadgroup variable has no type");
                        }
                        base = self.source((a, name_at));
                    }
                    let dims = self.source((name_at + 1, b));
                    // The dimensions stand once in a type, so that the rest may name it.
                    let (pointee, reference) = if dims.is_empty() {
                        (format!("threadgroup {base}*"), format!("threadgroup {base}& {name}"))
                    } else {
                        (
                            format!("threadgroup {base}(*){dims}"),
                            format!("threadgroup {base} (&{name}){dims}"),
                        )
                    };
                    let own = format!("__alignof__({base})");
                    let alignment =
                        asked.as_ref().map_or(own.clone(), |n| format!("(({n}) > {own} ? ({n}) : {own})"));
                    out.push_str(&format!(
                        "{reference} = *({pointee})msl_host_threadgroup({id}, sizeof({base}{dims}), {alignment}); "
                    ));
                    id += 1;
                }
                // Edits inside the statement (vector types as template arguments, say) would overlap this one.
                let (a, b) = (self.tokens[start].at, self.tokens[end].end());
                self.edits.retain(|e| e.1 <= a || e.0 >= b);
                self.replace(start, end + 1, out);
            }
        }
        Ok(())
    }

    fn edit_constants(&mut self, items: &Items) -> Checked<Vec<Constant>> {
        let mut constants: Vec<Constant> = Vec::new();
        let mut kinds: HashMap<&str, &str> = HashMap::new();
        for c in &items.constants {
            // A constant whose value takes a function constant is computed where it is used.
            let late = c.initialiser.is_some_and(|(a, b)| {
                (a..b).any(|k| {
                    self.word(k).is_some_and(|w| matches!(kinds.get(w), Some(&"function" | &"late")))
                })
            });
            let kind = match (c.index, late) {
                (Some(_), _) => "function",
                (_, true) => "late",
                _ if c.is_array || (!SCALARS.contains(&c.type_name.as_str()) && !c.is_constexpr) => "table",
                _ => "plain",
            };
            kinds.insert(&c.name, kind);
            let (from, to) = c.tokens;
            match kind {
                "function" => {
                    let index = c.index.unwrap_or_default();
                    if constants.iter().any(|o| o.index == index) {
                        return self.fail(from, format!("function constant {index} is declared twice"));
                    }
                    let known = [
                        "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half",
                        "bfloat", "float",
                    ];
                    if c.is_array || !known.contains(&c.type_name.as_str()) {
                        return self.fail(from, format!("function constant `{}` has to be a scalar", c.name));
                    }
                    let text = format!(
                        "extern \"C\" {{ extern const __global {ty} {name} __asm__(\"msl_fc_{index}\"); \
                         extern const __global bool msl_is_set_{name} __asm__(\"msl_fcd_{index}\"); }}",
                        ty = c.type_name,
                        name = c.name
                    );
                    self.replace(from, to, text);
                    constants.push(Constant {
                        name: c.name.clone(),
                        index,
                        type_name: c.type_name.clone(),
                        optional: false,
                    });
                }
                "late" => {
                    if c.is_array {
                        return self.fail(from, format!("table `{}` depends on a function constant", c.name));
                    }
                    let (a, b) = c.initialiser.unwrap_or((from, from));
                    let head = self.tokens[from].at..self.tokens[a].at;
                    self.edits.push((
                        head.start,
                        head.end,
                        format!("METAL_FUNC {} {}() {{ return (", c.type_name, c.name),
                    ));
                    self.edits.push((self.tokens[b].at, self.tokens[b].end(), "); }".into()));
                }
                _ => {
                    for k in from..c.initialiser.map_or(to, |r| r.0) {
                        if self.is(k, "constant") {
                            self.replace(k, k + 1, "static const __global");
                        } else if self.is(k, "static") {
                            self.replace(k, k + 1, "");
                        }
                    }
                }
            }
        }
        // Uses of the names.
        let declared: HashMap<&str, usize> =
            items.constants.iter().map(|c| (c.name.as_str(), c.tokens.0)).collect();
        let mut i = 0;
        while i < self.tokens.len() {
            let Some(w) = self.word(i) else {
                i += 1;
                continue;
            };
            if w == "is_function_constant_defined" {
                let Some(name) = self.word(i + 2).filter(|_| self.is(i + 1, "(") && self.is(i + 3, ")"))
                else {
                    return self
                        .fail(i, "is_function_constant_defined needs the name of a function constant");
                };
                let Some(c) = constants.iter_mut().find(|c| c.name == name) else {
                    return self.fail(i, format!("`{name}` is not a function constant"));
                };
                c.optional = true;
                self.replace(i, i + 4, format!("msl_is_set_{name}"));
                i += 4;
                continue;
            }
            if let Some(kind) = kinds.get(w) {
                let c = items.constants.iter().find(|c| c.name == w);
                let (from, to) = c.map_or((0, 0), |c| c.tokens);
                let own_name = i >= from && i < c.and_then(|c| c.initialiser).map_or(to, |r| r.0);
                let member = i > 0 && matches!(self.tokens[i - 1].text, "." | "->" | "::");
                // A parameter or a local of the same name hides the constant: its declaration follows a type.
                let hidden = i > 0
                    && (self.tokens[i - 1].kind == Kind::Word
                        && (SCALARS.contains(&self.tokens[i - 1].text)
                            || self.vectors.contains(self.tokens[i - 1].text))
                        || matches!(self.tokens[i - 1].text, "*" | "&")
                            && i > 1
                            && SCALARS.contains(&self.tokens[i - 2].text));
                if !own_name && hidden && matches!(*kind, "table" | "late") {
                    return self.fail(i, format!("`{w}` is the name of a constant at program scope"));
                }
                if !own_name && !member && declared.get(w).is_some_and(|&d| i > d) {
                    match *kind {
                        "table" => self.replace(i, i + 1, format!("metal::msl_constant({w})")),
                        "late" => self.replace(i, i + 1, format!("{w}()")),
                        _ => {}
                    }
                }
            }
            i += 1;
        }
        Ok(constants)
    }

    // ---- kernels

    fn parameters(&self, f: &Function) -> Checked<Vec<Source>> {
        let mut sources: Vec<Source> = Vec::new();
        for (n, (a, b)) in self.split(f.parameters.0, f.parameters.1)?.into_iter().enumerate() {
            let name = (a..b).rev().find_map(|k| self.word(k)).unwrap_or_default();
            // Attributes stand after the name: before the comma or the bracket.
            let attributes: Vec<_> = self.attributes_in(a + 1, b);
            let optional =
                attributes.iter().find(|x| x.name == "function_constant").and_then(|x| x.argument.clone());
            let mut found: Vec<Source> = Vec::new();
            for x in &attributes {
                let index = x.argument.as_deref().and_then(|s| s.trim().parse::<usize>().ok());
                match x.name.as_str() {
                    "buffer" => match index {
                        Some(i) if i < 31 => found.push(Source::Buffer(i, optional.clone())),
                        _ => return self.fail_at(x, "`[[buffer(n)]]` needs a number from 0 to 30"),
                    },
                    "threadgroup" => match index {
                        Some(i) if i < 31 => found.push(Source::Threadgroup(i)),
                        _ => return self.fail_at(x, "`[[threadgroup(n)]]` needs a number from 0 to 30"),
                    },
                    v if VECTOR_INPUTS.contains(&v) => found.push(Source::Vector(v.into())),
                    s if SCALAR_INPUTS.contains(&s) => found.push(Source::Scalar(s.into())),
                    "function_constant" | "maybe_unused" | "unused" => {}
                    other => return self.fail_at(x, format!("`[[{other}]]` does not belong to a parameter")),
                }
                if x.argument.is_some()
                    && !["buffer", "threadgroup", "function_constant"].contains(&x.name.as_str())
                {
                    return self.fail_at(x, format!("`[[{}]]` takes no argument", x.name));
                }
            }
            let place = format!("parameter {} (`{name}`) of kernel `{}`", n + 1, f.name);
            let one = match found.as_slice() {
                [] => {
                    return self.fail(
                        a,
                        format!(
                            "{place} has no attribute that says where it comes from, as [[buffer(n)]] does"
                        ),
                    );
                }
                [one] => one.clone(),
                _ => return self.fail(a, format!("{place} has two attributes that say where it comes from")),
            };
            let again = sources.iter().any(|s| match (s, &one) {
                (Source::Buffer(x, p), Source::Buffer(y, q)) => x == y && (p.is_none() || q.is_none()),
                (s, o) => s == o,
            });
            if again {
                return self.fail(a, format!("{place} has the attribute of another parameter"));
            }
            sources.push(one);
        }
        Ok(sources)
    }

    fn max_threads(&self, f: &Function) -> Checked<Option<u32>> {
        let mut max = None;
        for a in &f.attributes {
            match a.name.as_str() {
                "max_total_threads_per_threadgroup" => {
                    // A template parameter would do in Metal too, but no launch can be checked against it.
                    let n = a
                        .argument
                        .as_deref()
                        .and_then(|n| n.trim().parse().ok())
                        .filter(|n| (1..=1024).contains(n));
                    let Some(n) = n else {
                        return self.fail_at(
                            a,
                            "`[[max_total_threads_per_threadgroup(n)]]` needs a number from 1 to 1024",
                        );
                    };
                    max = Some(n);
                }
                "kernel" | "always_inline" | "noinline" | "maybe_unused" | "unused" => {}
                "host_name" if f.is_kernel && !f.is_template => {}
                other => {
                    return self
                        .fail_at(a, format!("`[[{other}]]` does not belong to function `{}`", f.name));
                }
            }
            if a.name.starts_with("max_total") && !f.is_kernel {
                return self.fail_at(a, format!("`[[{}]]`: function `{}` is not a kernel", a.name, f.name));
            }
        }
        Ok(max)
    }

    /// Words that a function's body and those of the functions it may call hold.
    fn reaches(&self, items: &Items, name: &str) -> HashSet<String> {
        let mut seen = HashSet::new();
        let mut open = vec![name.to_owned()];
        while let Some(name) = open.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            for f in items.functions.iter().filter(|f| f.name == name) {
                for k in f.parameters.0..f.body.1 {
                    open.extend(self.word(k).map(str::to_owned));
                }
                open.extend(
                    self.attributes_in(f.parameters.0, f.parameters.1).into_iter().filter_map(|a| a.argument),
                );
            }
            for c in items.constants.iter().filter(|c| c.name == name) {
                if let Some((a, b)) = c.initialiser {
                    open.extend((a..b).filter_map(|k| self.word(k)).map(str::to_owned));
                }
            }
        }
        seen
    }

    fn check_bodies(&self, items: &Items) -> Checked<()> {
        for f in &items.functions {
            if let Some(k) = (f.body.0..f.body.1).find(|&k| self.is(k, "static")) {
                return self.fail(k, "`static` in a function: Metal keeps no variables between calls");
            }
        }
        Ok(())
    }

    fn check_recursion(&self, items: &Items) -> Checked<()> {
        for f in &items.functions {
            // Overloads may call each other: one definition alone is certain to call itself.
            if items.functions.iter().filter(|g| g.name == f.name && g.body.0 < g.body.1).count() != 1 {
                continue;
            }
            let mut open: Vec<&Function> = vec![f];
            let mut seen: HashSet<usize> = HashSet::new();
            while let Some(g) = open.pop() {
                for k in g.body.0..g.body.1 {
                    let called = self.is(k + 1, "(") || self.is(k + 1, "<");
                    let Some(w) = self.word(k).filter(|_| called) else { continue };
                    if w == f.name {
                        return self.fail(k, format!("`{w}` calls itself: Metal has no recursion"));
                    }
                    let mut same = items.functions.iter().filter(|h| h.name == w && h.body.0 < h.body.1);
                    if let (Some(h), None) = (same.next(), same.next())
                        && seen.insert(h.at)
                    {
                        open.push(h);
                    }
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> String {
        let mut order: Vec<usize> = (0..self.edits.len()).collect();
        order.sort_by_key(|&i| (self.edits[i].0, self.edits[i].1, i));
        let mut out = String::with_capacity(self.text.len() * 2);
        let mut at = 0;
        for i in order {
            let (a, b, with) = &self.edits[i];
            if *a < at {
                continue;
            }
            out.push_str(&self.text[at..*a]);
            out.push_str(with);
            at = *b;
        }
        out.push_str(&self.text[at..]);
        out
    }
}

/// Reads a text whose includes have been taken out and whose macros have been expanded.
pub(crate) fn parse(text: &str) -> Checked<Parsed> {
    let mut r = Reader::new(text);
    r.check_words()?;
    r.take_attributes()?;
    let mut items = Items::default();
    r.items(0, r.tokens.len(), &mut items)?;
    r.check_pointers(&items)?;
    r.check_bodies(&items)?;
    r.check_recursion(&items)?;
    r.edit_vectors()?;
    r.edit_threadgroup(&items.functions)?;
    let constants = r.edit_constants(&items)?;

    let mut kernels: Vec<Kernel> = Vec::new();
    for f in &items.functions {
        let max_threads = r.max_threads(f)?;
        if !f.is_kernel {
            if let Some(a) = r.attributes_in(f.parameters.0 + 1, f.parameters.1).first() {
                return r.fail_at(a, format!("`[[{}]]`: function `{}` is not a kernel", a.name, f.name));
            }
            continue;
        }
        if f.body.0 >= f.body.1 && !r.is(f.body.1, "}") {
            continue;
        }
        if !f.returns_void {
            return r.fail(f.at, format!("kernel `{}` has to return void", f.name));
        }
        let parameters = r.parameters(f)?;
        for s in &parameters {
            if let Source::Buffer(i, Some(on)) = s
                && !constants.iter().any(|c| c.name == *on && c.type_name == "bool")
                && !items.constants.iter().any(|c| c.name == *on && c.type_name == "bool")
            {
                return r
                    .fail(f.at, format!("buffer {i} of kernel `{}`: `{on}` is not a bool constant", f.name));
            }
        }
        let reached = r.reaches(&items, &f.name);
        let reached: BTreeSet<String> =
            constants.iter().map(|c| c.name.clone()).filter(|c| reached.contains(c)).collect();
        let add = |kernels: &mut Vec<Kernel>, name: String, call: String, at: usize| {
            if kernels.iter().any(|k| k.name == name) {
                return r.fail(at, format!("two kernels are called `{name}`"));
            }
            kernels.push(Kernel {
                name,
                call,
                parameters: parameters.clone(),
                max_threads,
                constants: reached.clone(),
                line: r.line(r.tokens[at].at),
            });
            Ok(())
        };
        if f.is_template {
            for i in items.instantiations.iter().filter(|i| i.base == f.name) {
                if !i.is_kernel {
                    return r.fail(i.at, format!("the instantiation `{}` lacks `[[kernel]]`", i.call));
                }
                let Some(name) = i.host_name.clone() else {
                    return r.fail(
                        i.at,
                        format!("the instantiation `{}` lacks `[[host_name(\"...\")]]`", i.call),
                    );
                };
                add(&mut kernels, name, i.call.clone(), i.at)?;
            }
        } else {
            let host =
                f.attributes.iter().find(|a| a.name == "host_name").and_then(|a| a.argument.as_deref());
            let name = host.map_or(f.name.clone(), |n| n.trim_matches('"').to_owned());
            add(&mut kernels, name, f.name.clone(), f.at)?;
        }
    }
    for i in &items.instantiations {
        if i.is_kernel && !items.functions.iter().any(|f| f.is_kernel && f.is_template && f.name == i.base) {
            return r.fail(i.at, format!("`{}` is not a kernel template", i.base));
        }
    }
    Ok(Parsed { text: r.finish(), kernels, constants })
}
