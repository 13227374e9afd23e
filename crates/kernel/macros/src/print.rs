//! C++ from the checked tree: one source for Metal and CUDA, which the preludes of flashtile-kernel tell apart.

use crate::ir::{
    Argument, Binary, Call, Expr, For, Function, Generic, Kind, NameOf, Parameter, Passed, Scalar, Stmt,
    Struct, Type, Walk,
};

/// Columns of a line.
const WIDTH: usize = 110;

/// The precedence of other expressions than binary operators.
const CHOOSE: u8 = 1;
const UNARY: u8 = 12;
const POSTFIX: u8 = 13;

/// The name of a scalar; the preludes define those that C++ does not.
pub(crate) fn scalar(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::Bool => "bool",
        Scalar::U8 => "uchar",
        Scalar::I8 => "ft_i8",
        Scalar::U16 => "ushort",
        Scalar::I16 => "short",
        Scalar::U32 => "uint",
        Scalar::I32 => "int",
        Scalar::U64 => "ulong",
        Scalar::I64 => "ft_i64",
        Scalar::Usize => "size_t",
        Scalar::F32 => "float",
        Scalar::F16 => "ft_f16",
        Scalar::Bf16 => "ft_bf16",
    }
}

/// A type.
pub(crate) fn ty(of: &Type) -> String {
    match of {
        Type::Scalar(of) => scalar(*of).to_string(),
        Type::Parameter(name) => name.clone(),
        Type::Array(element, length) => {
            format!("ft_array<{}, {}>", ty(element), argument_of_template(length))
        }
        Type::Struct(name, arguments) => format!("{name}{}", generics(arguments)),
        Type::Fragment(element) => format!("ft_fragment<{}>", ty(element)),
        // Memory is written by its macros, where parameters are declared.
        Type::Buffer(element) | Type::Shared(element) => ty(element),
    }
}

fn generics(arguments: &[Generic]) -> String {
    if arguments.is_empty() {
        return String::new();
    }
    let arguments: Vec<String> = arguments
        .iter()
        .map(|argument| match argument {
            Generic::Type(of) => ty(of),
            Generic::Const(value) => argument_of_template(value),
        })
        .collect();
    format!("<{}>", arguments.join(", "))
}

/// `>` would end the list, so operators stand in parentheses.
fn argument_of_template(value: &Expr) -> String {
    match value.kind {
        Kind::Binary(..) => format!("({})", expr(value)),
        _ => expr(value),
    }
}

fn template(parameters: &[Parameter]) -> String {
    if parameters.is_empty() {
        return String::new();
    }
    let parameters: Vec<String> = parameters
        .iter()
        .map(|parameter| match parameter {
            Parameter::Type { name, .. } => format!("typename {name}"),
            Parameter::Const { name, ty } => format!("{} {name}", scalar(*ty)),
        })
        .collect();
    format!("template <{}>\n", parameters.join(", "))
}

fn comment(docs: &[String], indent: &str) -> String {
    docs.iter().map(|line| format!("{indent}//{line}\n")).collect()
}

/// A device function.
pub(crate) fn function(function: &Function) -> String {
    let mut out = comment(&function.docs, "");
    out.push_str(&template(&function.generics));
    let result = function.result.as_ref().map_or("void".to_string(), ty);
    let mut parameters = vec!["FT_THREAD_CONTEXT".to_string()];
    parameters.extend(function.arguments.iter().map(parameter));
    let head = format!("FT_DEVICE {result} {}({}) {{", function.name, parameters.join(", "));
    if head.len() <= WIDTH {
        out.push_str(&head);
    } else {
        let parameters = parameters.join(",\n    ");
        out.push_str(&format!("FT_DEVICE {result} {}(\n    {parameters}) {{", function.name));
    }
    out.push('\n');
    statements(&function.body, 1, &mut out);
    out.push_str("}\n");
    out
}

fn parameter(argument: &Argument) -> String {
    let name = &argument.name;
    let of = ty(&argument.ty);
    match (&argument.passed, &argument.ty) {
        (Passed::Memory, Type::Shared(_)) => format!("FT_SHARED({of}) {name}"),
        (Passed::Memory, _) => format!("FT_BUFFER({of}) {name}"),
        (Passed::MemoryMut, Type::Shared(_)) => format!("FT_SHARED_MUT({of}) {name}"),
        (Passed::MemoryMut, _) => format!("FT_BUFFER_MUT({of}) {name}"),
        (Passed::Params, _) => format!("FT_PARAMS({of}) {name}"),
        (Passed::Reference, _) => format!("FT_REF({of}) {name}"),
        (Passed::Value, _) if argument.mutable => format!("{of} {name}"),
        (Passed::Value | Passed::Constant, _) => format!("const {of} {name}"),
    }
}

/// The statements of a kernel's body.
pub(crate) fn body(body: &[Stmt]) -> String {
    let mut out = String::new();
    statements(body, 0, &mut out);
    out
}

/// A struct; of `#[params]`, with assertions of the host's layout.
pub(crate) fn structure(item: &Struct, layout: bool) -> String {
    let name = &item.name;
    let mut out = comment(&item.docs, "");
    out.push_str(&template(&item.generics));
    out.push_str(&format!("struct {name} {{\n"));
    for field in &item.fields {
        out.push_str(&comment(&field.docs, "    "));
        let of = match &field.ty {
            Type::Buffer(element) => format!("FT_BUFFER({})", ty(element)),
            value => ty(value),
        };
        out.push_str(&format!("    {of} {};\n", field.name));
    }
    out.push_str("};\n");
    if layout {
        let mut offset = Offset::default();
        for field in &item.fields {
            out.push_str(&format!("FT_LAYOUT({name}, {}, {});\n", field.name, offset.print()));
            offset.add(&field.ty);
        }
        out.push_str(&format!("FT_SIZE({name}, {});\n", offset.print()));
    }
    out
}

/// Bytes before a field: a number, and terms that depend on constants.
#[derive(Default)]
struct Offset {
    bytes: u64,
    more: Vec<String>,
}

impl Offset {
    fn add(&mut self, of: &Type) {
        let mut product = 1;
        let mut factors = Vec::new();
        let mut of = of;
        while let Type::Array(element, length) = of {
            match length.kind {
                Kind::Int { value, .. } => product *= value,
                _ => factors.push(operand(length, 11, true)),
            }
            of = element;
        }
        let bytes = match of {
            Type::Scalar(Scalar::U64 | Scalar::I64 | Scalar::Usize) => 8,
            _ => 4,
        };
        if factors.is_empty() {
            self.bytes += bytes * product;
        } else {
            factors.insert(0, (bytes * product).to_string());
            self.more.push(factors.join(" * "));
        }
    }

    fn print(&self) -> String {
        let mut terms = vec![self.bytes.to_string()];
        terms.extend(self.more.iter().cloned());
        terms.join(" + ")
    }
}

fn statements(body: &[Stmt], depth: usize, out: &mut String) {
    for stmt in body {
        statement(stmt, depth, out);
    }
}

fn statement(stmt: &Stmt, depth: usize, out: &mut String) {
    let indent = "    ".repeat(depth);
    let mut line = |text: String| {
        out.push_str(&indent);
        out.push_str(&text);
        out.push('\n');
    };
    match stmt {
        Stmt::Let { name, ty: written, mutable, value } => {
            let constant = if *mutable { "" } else { "const " };
            let of = written.as_ref().map_or("auto".to_string(), ty);
            match value {
                Some(value) if written.is_some() => {
                    line(format!("{constant}{of} {name} = {};", converted(value)))
                }
                Some(value) => line(format!("{constant}{of} {name} = {};", expr(value))),
                None => line(format!("{of} {name};")),
            }
        }
        Stmt::Shared { name, element, length } => {
            line(format!("FT_SHARED_ARRAY({}, {name}, {});", ty(element), expr(length)));
        }
        Stmt::Assign { place, op: Some(Binary::Rem), value } if !has_remainder(place, value) => {
            let place = expr(place);
            line(format!("{place} = ft_rem({place}, {});", expr(value)));
        }
        Stmt::Assign { place, op, value } => {
            let sign = op.map_or("", Binary::sign);
            line(format!("{} {sign}= {};", expr(place), converted(value)));
        }
        Stmt::Call(call) => line(format!("{};", expr(call))),
        Stmt::Discard(call) => line(format!("(void){};", expr(call))),
        Stmt::Break => line("break;".to_string()),
        Stmt::Continue => line("continue;".to_string()),
        Stmt::Return(None) => line("return;".to_string()),
        Stmt::Return(Some(value)) => line(format!("return {};", converted(value))),
        Stmt::Assert { condition, message } => {
            line(format!("static_assert({}, {message:?});", expr(condition)));
        }
        Stmt::If { condition, then, otherwise } => {
            let head = format!("if ({}) {{", expr(condition));
            line(head);
            statements(then, depth + 1, out);
            let mut otherwise = otherwise;
            while let [Stmt::If { condition, then, otherwise: next }] = &otherwise[..] {
                out.push_str(&format!("{indent}}} else if ({}) {{\n", expr(condition)));
                statements(then, depth + 1, out);
                otherwise = next;
            }
            if !otherwise.is_empty() {
                out.push_str(&format!("{indent}}} else {{\n"));
                statements(otherwise, depth + 1, out);
            }
            out.push_str(&format!("{indent}}}\n"));
        }
        Stmt::While { condition, body } => {
            line(format!("while ({}) {{", expr(condition)));
            statements(body, depth + 1, out);
            out.push_str(&format!("{indent}}}\n"));
        }
        Stmt::Loop { body } => {
            line("while (true) {".to_string());
            statements(body, depth + 1, out);
            out.push_str(&format!("{indent}}}\n"));
        }
        Stmt::Block(body) => {
            line("{".to_string());
            statements(body, depth + 1, out);
            out.push_str(&format!("{indent}}}\n"));
        }
        Stmt::For(looped) => for_loop(looped, depth, out),
    }
}

/// Loops walk as Rust's ranges do, also at the ends of the type: no variable leaves the range.
fn for_loop(looped: &For, depth: usize, out: &mut String) {
    let indent = "    ".repeat(depth);
    let For { variable, bound, extra, .. } = looped;
    if looped.unroll || (looped.start.is_const() && looped.end.is_const()) {
        out.push_str(&format!("{indent}FT_UNROLL\n"));
    }
    // Both ends have one type: the first end with a type gives it.
    let of = match &looped.ty {
        Some(of) => ty(of),
        None if looped.start.is_untyped() => format!("decltype(+{})", operand(&looped.end, UNARY, false)),
        None => format!("decltype(+{})", operand(&looped.start, UNARY, false)),
    };
    let start = converted(&looped.start);
    let fixed = looped.end.is_fixed();
    let end = if fixed { operand_converted(&looped.end, 8) } else { bound.clone() };
    let hoisted = if fixed { String::new() } else { format!(", {bound} = {}", converted(&looped.end)) };
    let mut first = None;
    let head = match &looped.walk {
        Walk::Forward => {
            format!("for ({of} {variable} = {start}{hoisted}; {variable} < {end}; ++{variable}) {{")
        }
        // A last value below the greatest of every type leaves room for the comparison that ends the loop.
        Walk::Inclusive if matches!(looped.end.kind, Kind::Int { value, .. } if value < i32::MAX as u64) => {
            format!("for ({of} {variable} = {start}; {variable} <= {end}; ++{variable}) {{")
        }
        Walk::Inclusive => format!(
            "for ({of} {variable} = {start}{hoisted}, {extra} = {variable} <= {end}; {extra} > 0; \
             {extra} = {variable} < {end}, {variable} += {extra}) {{"
        ),
        // The steps are counted before the first: the variable may pass the end, but is not looked at there.
        Walk::Step(step) => {
            let step = operand_converted(step, 11);
            let end = if fixed { operand_converted(&looped.end, 10) } else { bound.clone() };
            format!(
                "for ({of} {variable} = {start}{hoisted}, {extra} = {variable} < {end} ? ({end} - {variable} - 1) / {step} + 1 : 0; \
                 {extra} > 0; --{extra}, {variable} += {step}) {{"
            )
        }
        Walk::SignedStep(step) => {
            first = looped.named.then(|| format!("const {of} {variable} = {of}({bound});"));
            signed_steps(looped, &of, step)
        }
        Walk::Reverse => {
            let fixed = looped.start.is_fixed();
            let low = if fixed { operand_converted(&looped.start, 8) } else { bound.clone() };
            let hoisted = if fixed { String::new() } else { format!(", {bound} = {start}") };
            let high = converted(&looped.end);
            first = Some(format!("--{variable};"));
            format!("for ({of} {variable} = {high}{hoisted}; {variable} > {low};) {{")
        }
    };
    out.push_str(&format!("{indent}{head}\n"));
    if let Some(first) = first {
        out.push_str(&format!("{indent}    {first}\n"));
    }
    statements(&looped.body, depth + 1, out);
    out.push_str(&format!("{indent}}}\n"));
}

/// The head of a loop by steps over a type that has or may have a sign. It counts and adds in the unsigned type: a signed sum past
/// the end might overflow.
fn signed_steps(looped: &For, of: &str, step: &Expr) -> String {
    let For { bound, extra, .. } = looped;
    let unsigned = match looped.ty {
        Some(Type::Scalar(of)) => scalar(of.unsigned()).to_string(),
        _ => format!("ft_unsigned<{of}>"),
    };
    let (start, end, step) = (converted(&looped.start), converted(&looped.end), converted(step));
    format!(
        "for ({unsigned} {bound} = {unsigned}({start}), {extra} = ft_steps<{of}>({start}, {end}, {step}); \
         {extra} > 0; --{extra}, {bound} += {step}) {{"
    )
}

/// A value where C++ converts it to a type that is written: small literals are their digits.
fn converted(value: &Expr) -> String {
    match &value.kind {
        Kind::Int { value: digits, hex } if *digits <= i32::MAX as u64 => int(*digits, *hex, None),
        _ => expr(value),
    }
}

fn operand_converted(value: &Expr, at_least: u8) -> String {
    match &value.kind {
        Kind::Int { .. } => converted(value),
        _ => operand(value, at_least, true),
    }
}

/// An expression.
pub(crate) fn expr(value: &Expr) -> String {
    match &value.kind {
        Kind::Int { value: digits, hex } => int(*digits, *hex, value.ty.as_ref()),
        Kind::Float(digits) => float(digits),
        Kind::Bool(flag) => flag.to_string(),
        Kind::Name { name, .. } => name.clone(),
        Kind::Not(inner) if inner.scalar() == Some(Scalar::Bool) => {
            format!("!{}", operand(inner, UNARY, false))
        }
        Kind::Not(inner) => format!("ft_not({})", expr(inner)),
        Kind::Neg(inner) => negative(inner),
        Kind::Binary(Binary::Rem, left, right) if !has_remainder(left, right) => {
            format!("ft_rem({}, {})", expr(left), expr(right))
        }
        Kind::Binary(op, left, right) if op.is_bitwise() && value.scalar() == Some(Scalar::Bool) => {
            format!("bool({})", binary(*op, left, right))
        }
        Kind::Binary(op, left, right) => binary(*op, left, right),
        Kind::Cast(inner, to) if inner.is_const() && to.is_integer() && inner.is_integer() => {
            format!("{}({})", scalar(*to), converted(inner))
        }
        Kind::Cast(inner, to) => format!("ft_cast<{}>({})", scalar(*to), expr(inner)),
        // No method of an array can be called in constant memory.
        Kind::Index(base, index) if is_of_params(base) => {
            format!("{}.elements[{}]", operand(base, POSTFIX, false), converted(index))
        }
        Kind::Index(base, index) => format!("{}[{}]", operand(base, POSTFIX, false), converted(index)),
        Kind::Field(base, name) => format!("{}.{name}", operand(base, POSTFIX, false)),
        Kind::Call(of) => call(of),
        Kind::Limit(of, name) => limit(of, name),
        Kind::Array(elements) => {
            let printed: Vec<String> = elements.iter().map(expr).collect();
            match &value.ty {
                Some(of) => format!("{}{{{{{}}}}}", ty(of), printed.join(", ")),
                None => format!("ft_array_of({})", printed.join(", ")),
            }
        }
        Kind::Repeat(element, length) => {
            format!("ft_repeat<{}>({})", argument_of_template(length), expr(element))
        }
        Kind::Choose(condition, a, b) => {
            // Beside a value that is no variable, a variable that may be a struct or an array is copied first: it has an address
            // space, the other has none.
            let apart = value.scalar().is_none() && is_place(a) != is_place(b);
            let arm = |arm: &Expr, right: bool| match apart && is_place(arm) {
                true => format!("ft_value({})", expr(arm)),
                false => operand(arm, CHOOSE, right),
            };
            format!(
                "{} ? {} : {}",
                operand(condition, Binary::Or.precedence(), false),
                arm(a, true),
                arm(b, false)
            )
        }
        Kind::Invalid => String::new(),
    }
}

/// Returns true if a value is a variable or a part of one.
fn is_place(value: &Expr) -> bool {
    matches!(value.kind, Kind::Name { .. } | Kind::Index(..) | Kind::Field(..))
}

/// Returns true if a value is part of a `#[params]` struct.
fn is_of_params(value: &Expr) -> bool {
    match &value.kind {
        Kind::Name { of, .. } => *of == NameOf::Params,
        Kind::Index(base, _) | Kind::Field(base, _) => is_of_params(base),
        _ => false,
    }
}

/// Returns true if `%` prints as C++'s, which is for integers only. Floats, and operands of a type that is
/// not known here, go to `ft_rem`, which takes the type of its first operand: a literal there would convert
/// the second to `int`.
fn has_remainder(left: &Expr, right: &Expr) -> bool {
    left.is_integer() || right.is_integer()
}

fn binary(op: Binary, left: &Expr, right: &Expr) -> String {
    let side = |value: &Expr, is_right: bool| {
        let mixes = match (&value.kind, op) {
            _ if is_call(value) => false,
            (Kind::Binary(inner, ..), Binary::Or) => *inner == Binary::And,
            (Kind::Binary(inner, ..), _) => {
                *inner != op
                    && (op.is_bitwise() || op.is_shift() || (op.is_comparison() && inner.is_comparison()))
            }
            _ => false,
        };
        if mixes { format!("({})", expr(value)) } else { operand(value, op.precedence(), is_right) }
    };
    format!("{} {} {}", side(left, false), op.sign(), side(right, true))
}

/// Returns true if a binary operator prints as a call.
fn is_call(value: &Expr) -> bool {
    match &value.kind {
        Kind::Binary(Binary::Rem, left, right) => !has_remainder(left, right),
        Kind::Binary(op, ..) => op.is_bitwise() && value.scalar() == Some(Scalar::Bool),
        _ => false,
    }
}

/// An operand, in parentheses where it binds less tightly, or as tightly and on the right.
fn operand(value: &Expr, precedence: u8, right: bool) -> String {
    let own = match &value.kind {
        Kind::Binary(..) if is_call(value) => POSTFIX,
        Kind::Binary(op, ..) => op.precedence(),
        Kind::Choose(..) => CHOOSE,
        Kind::Neg(_) => UNARY,
        Kind::Not(inner) if inner.scalar() == Some(Scalar::Bool) => UNARY,
        _ => POSTFIX,
    };
    if own < precedence || (right && own == precedence) { format!("({})", expr(value)) } else { expr(value) }
}

/// The least integers have no literal: their digits alone are too large. C++ negates 8 and 16 bits as an `int`.
fn negative(inner: &Expr) -> String {
    match (&inner.kind, inner.scalar()) {
        (Kind::Int { value, hex }, Some(of @ (Scalar::I8 | Scalar::I16))) => {
            format!("{}(-{})", scalar(of), int(*value, *hex, None))
        }
        (_, Some(of @ (Scalar::I8 | Scalar::I16))) => format!("{}(-({}))", scalar(of), expr(inner)),
        (Kind::Int { value: 0x8000_0000, .. }, None | Some(Scalar::I32)) => "(-2147483647 - 1)".to_string(),
        (Kind::Int { value: 0x8000_0000_0000_0000, .. }, _) => "ft_i64(0x8000000000000000ul)".to_string(),
        (Kind::Neg(_), _) => format!("-({})", expr(inner)),
        _ => format!("-{}", operand(inner, UNARY, false)),
    }
}

/// An integer literal: in its type, or, without one, converted by C++ to the type of its neighbour.
fn int(value: u64, hex: bool, of: Option<&Type>) -> String {
    let mut digits = if hex { format!("{value:#x}") } else { value.to_string() };
    if value > u64::from(u32::MAX) {
        // Metal has no `long long`, and CUDA takes the greater of the two types where `long` has 32 bits.
        // A literal without a type may stand beside an i64: decimal digits are signed as long as they fit.
        if value > i64::MAX as u64 || of.is_some() {
            digits.push_str("ul");
        }
    } else if value > i32::MAX as u64 || of == Some(&Type::Scalar(Scalar::U32)) {
        digits.push('u');
    }
    match of {
        None | Some(Type::Scalar(Scalar::U32 | Scalar::I32)) => digits,
        Some(of) => format!("{}({digits})", ty(of)),
    }
}

/// The f32 that Rust reads from the digits, in its shortest form: of digits halfway between two f32, NVRTC reads the greater one and
/// Rust the even one.
fn float(digits: &str) -> String {
    digits.parse::<f32>().map_or_else(|_| format!("{digits}f"), |x| format!("{x:?}f"))
}

fn call(of: &Call) -> String {
    let context = of.context.then(|| "ft".to_string());
    let arguments: Vec<String> = context.into_iter().chain(of.arguments.iter().map(expr)).collect();
    format!("{}{}({})", of.callee.name(), generics(&of.generics), arguments.join(", "))
}

fn limit(of: &Type, name: &str) -> String {
    match name {
        "INFINITY" => "ft_infinity".to_string(),
        "NEG_INFINITY" => "(-ft_infinity)".to_string(),
        "NAN" => "ft_nan".to_string(),
        "MIN_POSITIVE" => "ft_min_positive".to_string(),
        "EPSILON" => "ft_epsilon".to_string(),
        "MAX" => format!("ft_max_of<{}>()", ty(of)),
        "MIN" => format!("ft_min_of<{}>()", ty(of)),
        _ => format!("ft_bits_of<{}>()", ty(of)),
    }
}
