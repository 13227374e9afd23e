//! Conditions of a launch, from Rust to Swift.
//!
//! A condition is translated where it is made of numbers that a host has: lengths of buffers, fields of parameters, constants,
//! generics, the grid, and constants of the kernel's source. Conditions that call functions of the kernel's crate are not.

use flashtile::kernel::source::{Cpp, GenericKind, ParameterKind, dependencies};
use flashtile::kernel::{Kernel, ScalarType};

/// The number of threadgroups, as conditions of kernels spell it.
const GROUP_COUNT: &str = "groups.iter().map(|n| *n as usize).product::<usize>()";

/// A condition in Swift: an expression over `arguments`, `constants`, `traits` and `groups`. `None` where it cannot be said there.
pub(super) fn swift(kernel: &'static Kernel, condition: &str) -> Option<String> {
    let line: String = condition.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = line.replace(GROUP_COUNT, "GROUP_COUNT");
    let mut parser = Parser { kernel, tokens: tokens(&text)?, at: 0 };
    let parsed = parser.or()?;
    (parser.at == parser.tokens.len() && parsed.is_bool).then_some(parsed.code)
}

/// A name of the kernel language in Swift: `partial_out` is `partialOut`.
pub(super) fn camel(name: &str) -> String {
    let mut words = name.split('_');
    let first = words.next().unwrap_or_default().to_owned();
    let joined = words.fold(first, |mut all, word| {
        let mut letters = word.chars();
        all.extend(letters.next().map(|c| c.to_ascii_uppercase()));
        all.push_str(letters.as_str());
        all
    });
    // Words of Swift that parameters may have as names.
    let words =
        ["in", "is", "as", "repeat", "where", "default", "operator", "self", "func", "protocol", "init"];
    if words.contains(&&*joined) { format!("`{joined}`") } else { joined }
}

/// The name of a generic in Swift.
pub(super) fn generic(name: &str) -> String {
    camel(&name.to_ascii_lowercase())
}

/// Names, numbers and operators.
fn tokens(text: &str) -> Option<Vec<&str>> {
    const PAIRS: [&str; 7] = ["||", "&&", ">=", "<=", "==", "!=", "::"];
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let len = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else if PAIRS.iter().any(|pair| rest.starts_with(pair)) {
            2
        } else {
            first.len_utf8()
        };
        tokens.push(rest.get(..len)?);
        rest = rest.get(len..)?.trim_start();
    }
    Some(tokens)
}

/// An expression in Swift: an `Int` or a `Bool`.
struct Swift {
    code: String,
    is_bool: bool,
}

impl Swift {
    fn int(code: String) -> Self {
        Self { code, is_bool: false }
    }

    fn bool(code: String) -> Self {
        Self { code, is_bool: true }
    }
}

/// What a name or a chain of fields stands for.
enum Place {
    Value(Swift),
    Buffer(String),
    /// A struct of parameters: the argument's name, and the number of the parameter.
    Params(String, usize),
    Groups,
}

struct Parser<'a> {
    kernel: &'static Kernel,
    tokens: Vec<&'a str>,
    at: usize,
}

impl Parser<'_> {
    fn peek(&self) -> &str {
        self.tokens.get(self.at).copied().unwrap_or_default()
    }

    /// Skips a token, where it is the next one.
    fn eat(&mut self, token: &str) -> bool {
        let found = self.peek() == token;
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, token: &str) -> Option<()> {
        self.eat(token).then_some(())
    }

    fn or(&mut self) -> Option<Swift> {
        let mut left = self.and()?;
        while self.eat("||") {
            let right = self.and()?;
            (left.is_bool && right.is_bool).then_some(())?;
            left = Swift::bool(format!("{} || {}", left.code, right.code));
        }
        Some(left)
    }

    fn and(&mut self) -> Option<Swift> {
        let mut left = self.comparison()?;
        while self.eat("&&") {
            let right = self.comparison()?;
            (left.is_bool && right.is_bool).then_some(())?;
            left = Swift::bool(format!("{} && {}", left.code, right.code));
        }
        Some(left)
    }

    fn comparison(&mut self) -> Option<Swift> {
        let left = self.sum()?;
        let operators = ["==", "!=", ">=", "<=", ">", "<"];
        let Some(operator) = operators.into_iter().find(|operator| self.peek() == *operator) else {
            return Some(left);
        };
        self.at += 1;
        let right = self.sum()?;
        (!left.is_bool && !right.is_bool).then_some(())?;
        Some(Swift::bool(format!("{} {operator} {}", left.code, right.code)))
    }

    fn sum(&mut self) -> Option<Swift> {
        let mut left = self.product()?;
        while self.eat("+") {
            left = call("plus", &left, &self.product()?)?;
        }
        Some(left)
    }

    fn product(&mut self) -> Option<Swift> {
        let mut left = self.cast()?;
        while self.eat("*") {
            left = call("times", &left, &self.cast()?)?;
        }
        Some(left)
    }

    /// Casts to types of 64 bits keep the value of what conditions count.
    fn cast(&mut self) -> Option<Swift> {
        let value = self.unary()?;
        while self.eat("as") {
            (!value.is_bool && (self.eat("usize") || self.eat("u64"))).then_some(())?;
        }
        Some(value)
    }

    fn unary(&mut self) -> Option<Swift> {
        if self.eat("!") {
            let value = self.unary()?;
            return value.is_bool.then(|| Swift::bool(format!("!{}", value.code)));
        }
        self.postfix()
    }

    fn postfix(&mut self) -> Option<Swift> {
        let mut place = self.primary()?;
        loop {
            place = if self.eat(".") {
                self.member(place)?
            } else if self.eat("[") {
                let Place::Groups = place else { return None };
                let index: usize = self.peek().parse().ok()?;
                self.at += 1;
                self.expect("]")?;
                let axis = ["width", "height", "depth"].get(index)?;
                Place::Value(Swift::int(format!("groups.{axis}")))
            } else {
                break;
            };
        }
        match place {
            Place::Value(value) => Some(value),
            Place::Buffer(_) | Place::Params(..) | Place::Groups => None,
        }
    }

    /// What follows a dot: a field, or a method with its arguments.
    fn member(&mut self, place: Place) -> Option<Place> {
        let name = self.tokens.get(self.at).copied()?;
        self.at += 1;
        match place {
            Place::Params(argument, parameter) => {
                let ParameterKind::Params { fields, .. } = self.kernel.parameters.get(parameter)?.kind else {
                    return None;
                };
                let field = fields.iter().find(|field| field.name == name)?;
                is_integer(field.element).then_some(())?;
                let mut code = format!("arguments.{argument}.{}", camel(name));
                if field.len > 1 {
                    self.expect("[")?;
                    let index: usize = self.peek().parse().ok().filter(|index| *index < field.len)?;
                    self.at += 1;
                    self.expect("]")?;
                    code.push_str(&format!(".{index}"));
                }
                Some(Place::Value(Swift::int(format!("Int(clamping: {code})"))))
            }
            Place::Buffer(count) => {
                self.expect("(")?;
                self.expect(")")?;
                match name {
                    "len" => Some(Place::Value(Swift::int(count))),
                    "is_empty" => Some(Place::Value(Swift::bool(format!("({count} == 0)")))),
                    _ => None,
                }
            }
            Place::Value(value) => {
                self.expect("(")?;
                let argument = if self.peek() == ")" { None } else { Some(self.or()?) };
                self.expect(")")?;
                let value = match (name, argument) {
                    ("is_power_of_two", None) if !value.is_bool => {
                        Swift::bool(format!("isPowerOfTwo({})", value.code))
                    }
                    ("is_multiple_of", Some(by)) => Swift::bool(call("isMultiple", &value, &by)?.code),
                    ("div_ceil", Some(by)) => call("dividedUp", &value, &by)?,
                    ("saturating_mul", Some(by)) => call("times", &value, &by)?,
                    ("saturating_add", Some(by)) => call("plus", &value, &by)?,
                    _ => return None,
                };
                Some(Place::Value(value))
            }
            Place::Groups => None,
        }
    }

    fn primary(&mut self) -> Option<Place> {
        if self.eat("(") {
            let value = self.or()?;
            self.expect(")")?;
            // Numbers are calls already, which need none.
            let code = if value.is_bool { format!("({})", value.code) } else { value.code };
            return Some(Place::Value(Swift { code, ..value }));
        }
        let name = self.tokens.get(self.at).copied()?;
        self.at += 1;
        if name.starts_with(|c: char| c.is_ascii_digit()) {
            let number: u32 = name.trim_end_matches("usize").replace('_', "").parse().ok()?;
            return Some(Place::Value(Swift::int(number.to_string())));
        }
        match name {
            "GROUP_COUNT" => Some(Place::Value(Swift::int("count(groups)".to_owned()))),
            "groups" => Some(Place::Groups),
            _ => self.parameter(name).or_else(|| self.generic(name)).or_else(|| self.item(name)),
        }
    }

    fn parameter(&self, name: &str) -> Option<Place> {
        let at = self.kernel.parameters.iter().position(|parameter| parameter.name == name)?;
        let swift = camel(name);
        Some(match self.kernel.parameters.get(at)?.kind {
            ParameterKind::Buffer { .. } => Place::Buffer(format!("{swift}Count")),
            ParameterKind::Params { .. } => Place::Params(swift, at),
            ParameterKind::Constant(ScalarType::Bool) => {
                Place::Value(Swift::bool(format!("constants.{swift}")))
            }
            ParameterKind::Constant(scalar) if is_integer(scalar) => {
                Place::Value(Swift::int(format!("Int(clamping: constants.{swift})")))
            }
            ParameterKind::Scalar(scalar) if is_integer(scalar) => {
                Place::Value(Swift::int(format!("Int(clamping: arguments.{swift})")))
            }
            ParameterKind::Constant(_) | ParameterKind::Scalar(_) => return None,
        })
    }

    fn generic(&self, name: &str) -> Option<Place> {
        let derived = self.kernel.derived.iter().map(|of| &of.parameter);
        let found = self.kernel.generics.iter().chain(derived).find(|generic| generic.name == name)?;
        let code = format!("traits.{}", generic(name));
        match found.kind {
            GenericKind::Const(ScalarType::Bool) => Some(Place::Value(Swift::bool(code))),
            GenericKind::Const(_) => Some(Place::Value(Swift::int(code))),
            GenericKind::Element | GenericKind::Number | GenericKind::Scalar => None,
        }
    }

    /// A constant that the kernel's source uses too.
    fn item(&self, name: &str) -> Option<Place> {
        let item = dependencies(&self.kernel.source).into_iter().find(|item| item.name == name)?;
        let Cpp::Table { element, len: None, literals } = item.cpp else { return None };
        is_integer(element).then_some(())?;
        let literal = literals().concat();
        let number: i64 = literal.trim_end_matches(['u', 'l', 'U', 'L']).parse().ok()?;
        Some(Place::Value(Swift::int(number.to_string())))
    }
}

/// A function of two integers, which is given where Swift's own would stop at an overflow or a division by zero.
fn call(function: &str, left: &Swift, right: &Swift) -> Option<Swift> {
    let is_int = !left.is_bool && !right.is_bool;
    is_int.then(|| Swift::int(format!("{function}({}, {})", left.code, right.code)))
}

/// Whether it counts something.
const fn is_integer(scalar: ScalarType) -> bool {
    match scalar {
        ScalarType::U8
        | ScalarType::I8
        | ScalarType::U16
        | ScalarType::I16
        | ScalarType::U32
        | ScalarType::I32
        | ScalarType::U64
        | ScalarType::I64
        | ScalarType::Usize => true,
        ScalarType::Bool | ScalarType::F32 | ScalarType::F16 | ScalarType::Bf16 => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashtile::kernels::KERNELS;

    fn of(kernel: &str, condition: &str) -> Option<String> {
        swift(KERNELS.iter().find(|of| of.name == kernel).unwrap(), condition)
    }

    #[test]
    fn conditions_over_lengths_and_numbers() {
        let cases = [
            ("params.splits > 0", "Int(clamping: arguments.params.splits) > 0"),
            (
                "partial_out.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * DV",
                "partialOutCount >= times(times(count(groups), Int(clamping: arguments.params.splits)), traits.dv)",
            ),
            (
                "!has_sinks || sinks.len() >= groups[1] as usize",
                "!constants.hasSinks || sinksCount >= groups.height",
            ),
            ("params.out[2] == 1", "Int(clamping: arguments.params.out.2) == 1"),
            ("(lse.len() + 2).div_ceil(8usize) <= 1_000", "dividedUp(plus(lseCount, 2), 8) <= 1000"),
            (
                "out.is_empty() && groups[2].is_multiple_of(ORDER)",
                "(outCount == 0) && isMultiple(groups.depth, traits.order)",
            ),
        ];
        for (rust, expected) in cases {
            assert_eq!(of("merge", rust).as_deref(), Some(expected), "{rust}");
        }
        assert_eq!(
            of("hadamard", "groups[0] as usize >= (rows as usize).div_ceil(4)").as_deref(),
            Some("groups.width >= dividedUp(Int(clamping: arguments.rows), 4)")
        );
        let paging = "paging != PAGED_BY_16 || params.page.is_multiple_of(16)";
        assert_eq!(
            of("decode", paging).as_deref(),
            Some(
                "Int(clamping: constants.paging) != 2 || isMultiple(Int(clamping: arguments.params.page), 16)"
            )
        );
    }

    #[test]
    fn other_conditions_are_left_to_the_caller() {
        for rust in [
            "params.reach(groups, DV).is_some_and(|needed| out.len() >= needed)",
            "factors.len() >= DV + block_count(ORDER, DV)",
            "Q > 0",
            "params.out > 0",
            "params.out[3] > 0",
            "groups[3] > 0",
            "params.splits",
            "params.splits > has_sinks",
            "DV as u8 > 0",
            "params.splits > 0)",
            "paging <= PAGED_BY_16",
            "",
        ] {
            assert_eq!(of("merge", rust), None, "{rust}");
        }
    }

    #[test]
    fn names_in_swift() {
        assert_eq!(
            ["q", "partial_max_sum", "mask_step", "in", "page_divisor"].map(camel),
            ["q", "partialMaxSum", "maskStep", "`in`", "pageDivisor"]
        );
        assert_eq!(generic("DV"), "dv");
    }
}
