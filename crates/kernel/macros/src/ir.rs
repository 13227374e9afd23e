//! The tree between the check of a function's tokens and the printing of C++.
//!
//! Every node prints; the check refuses whatever has no node here. Types are known where they are
//! written or follow from literals, intrinsics and locals, and `None` elsewhere: rustc knows them all, C++
//! infers them again, and the printer only needs them where the two languages would spell things differently.

/// A scalar type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar {
    Bool,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
    Usize,
    F32,
    F16,
    Bf16,
}

impl Scalar {
    /// The scalar of a Rust type's name.
    pub(crate) fn of(name: &str) -> Option<Scalar> {
        Some(match name {
            "bool" => Scalar::Bool,
            "u8" => Scalar::U8,
            "i8" => Scalar::I8,
            "u16" => Scalar::U16,
            "i16" => Scalar::I16,
            "u32" => Scalar::U32,
            "i32" => Scalar::I32,
            "u64" => Scalar::U64,
            "i64" => Scalar::I64,
            "usize" => Scalar::Usize,
            "f32" => Scalar::F32,
            "f16" => Scalar::F16,
            "bf16" => Scalar::Bf16,
            _ => return None,
        })
    }

    /// The variant of flashtile-kernel's `ScalarType`.
    pub(crate) fn variant(self) -> &'static str {
        match self {
            Scalar::Bool => "Bool",
            Scalar::U8 => "U8",
            Scalar::I8 => "I8",
            Scalar::U16 => "U16",
            Scalar::I16 => "I16",
            Scalar::U32 => "U32",
            Scalar::I32 => "I32",
            Scalar::U64 => "U64",
            Scalar::I64 => "I64",
            Scalar::Usize => "Usize",
            Scalar::F32 => "F32",
            Scalar::F16 => "F16",
            Scalar::Bf16 => "Bf16",
        }
    }

    /// The name in Rust.
    pub(crate) fn rust(self) -> String {
        self.variant().to_ascii_lowercase()
    }

    pub(crate) fn is_integer(self) -> bool {
        !matches!(self, Scalar::Bool | Scalar::F32 | Scalar::F16 | Scalar::Bf16)
    }

    /// The type of `unsigned_abs` and `abs_diff`.
    pub(crate) fn unsigned(self) -> Scalar {
        match self {
            Scalar::I8 => Scalar::U8,
            Scalar::I16 => Scalar::U16,
            Scalar::I32 => Scalar::U32,
            Scalar::I64 => Scalar::U64,
            other => other,
        }
    }
}

/// A type, as far as it can be read off the tokens.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Type {
    Scalar(Scalar),
    /// A type parameter.
    Parameter(String),
    /// `[T; N]`.
    Array(Box<Type>, Box<Expr>),
    /// A struct of the kernel language with its generic arguments.
    Struct(String, Vec<Generic>),
    /// `Fragment<T>`.
    Fragment(Box<Type>),
    /// `Buffer<T>`: device memory.
    Buffer(Box<Type>),
    /// `Shared<T>`: threadgroup memory.
    Shared(Box<Type>),
}

impl Type {
    pub(crate) const BOOL: Type = Type::Scalar(Scalar::Bool);
    pub(crate) const U32: Type = Type::Scalar(Scalar::U32);
    pub(crate) const I32: Type = Type::Scalar(Scalar::I32);
    pub(crate) const I64: Type = Type::Scalar(Scalar::I64);
    pub(crate) const USIZE: Type = Type::Scalar(Scalar::Usize);
    pub(crate) const F32: Type = Type::Scalar(Scalar::F32);
}

/// A generic argument.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Generic {
    Type(Type),
    Const(Expr),
}

/// A generic parameter.
#[derive(Clone, Debug)]
pub(crate) enum Parameter {
    Type { name: String, bound: Bound },
    Const { name: String, ty: Scalar },
}

impl Parameter {
    pub(crate) fn name(&self) -> &str {
        match self {
            Parameter::Type { name, .. } | Parameter::Const { name, .. } => name,
        }
    }
}

/// The bound of a type parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    Scalar,
    Number,
    Element,
}

/// How a function's argument is passed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Passed {
    /// A scalar, an array, a struct or a fragment.
    Value,
    /// `&Params` of a `#[params]` struct.
    Params,
    /// `&Buffer<T>` and `&Shared<T>`.
    Memory,
    /// `&mut Buffer<T>` and `&mut Shared<T>`.
    MemoryMut,
    /// `&mut` of a value.
    Reference,
    /// `#[constant]` of a kernel: fixed when a pipeline is made.
    Constant,
}

/// An argument of a function.
#[derive(Clone, Debug)]
pub(crate) struct Argument {
    /// The name in C++.
    pub(crate) name: String,
    pub(crate) ty: Type,
    pub(crate) passed: Passed,
    /// `mut`, of a value.
    pub(crate) mutable: bool,
}

/// A kernel or a device function.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) docs: Vec<String>,
    pub(crate) generics: Vec<Parameter>,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) result: Option<Type>,
    pub(crate) body: Vec<Stmt>,
}

/// A struct.
#[derive(Clone, Debug)]
pub(crate) struct Struct {
    pub(crate) name: String,
    pub(crate) docs: Vec<String>,
    pub(crate) generics: Vec<Parameter>,
    pub(crate) fields: Vec<Field>,
}

/// A field of a struct.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) docs: Vec<String>,
    /// The name in C++.
    pub(crate) name: String,
    pub(crate) ty: Type,
}

/// A statement.
#[derive(Clone, Debug)]
pub(crate) enum Stmt {
    /// `let`: `value` is `None` where the following statements assign it.
    Let {
        name: String,
        ty: Option<Type>,
        mutable: bool,
        value: Option<Expr>,
    },
    /// A threadgroup array.
    Shared {
        name: String,
        element: Type,
        length: Expr,
    },
    /// `place op= value`, or `place = value` without an operator.
    Assign {
        place: Expr,
        op: Option<Binary>,
        value: Expr,
    },
    /// A call for its effect.
    Call(Expr),
    /// `let _ = call`: a call for its effect, without its result.
    Discard(Expr),
    If {
        condition: Expr,
        then: Vec<Stmt>,
        otherwise: Vec<Stmt>,
    },
    While {
        condition: Expr,
        body: Vec<Stmt>,
    },
    Loop {
        body: Vec<Stmt>,
    },
    For(Box<For>),
    Block(Vec<Stmt>),
    Break,
    Continue,
    Return(Option<Expr>),
    Assert {
        condition: Expr,
        message: String,
    },
}

/// A `for` loop over a range.
#[derive(Clone, Debug)]
pub(crate) struct For {
    pub(crate) variable: String,
    /// The name of the hoisted end of the range, of its start where it is walked backwards, or of the unsigned position where
    /// it is walked by a step over a type with a sign.
    pub(crate) bound: String,
    /// The name of the hoisted step, or of the flag of an inclusive range.
    pub(crate) extra: String,
    pub(crate) ty: Option<Type>,
    pub(crate) start: Expr,
    pub(crate) end: Expr,
    pub(crate) walk: Walk,
    /// The body may use the variable: it is not `_`.
    pub(crate) named: bool,
    pub(crate) unroll: bool,
    pub(crate) body: Vec<Stmt>,
}

/// How a range is walked.
#[derive(Clone, Debug)]
pub(crate) enum Walk {
    Forward,
    Inclusive,
    /// By a step, over an unsigned type.
    Step(Expr),
    /// By a step, over a type that has or may have a sign; the start may be printed twice.
    SignedStep(Expr),
    Reverse,
}

/// An expression.
#[derive(Clone, Debug)]
pub(crate) struct Expr {
    pub(crate) kind: Kind,
    pub(crate) ty: Option<Type>,
}

/// Two expressions that print alike are equal, whatever is known of their types.
impl PartialEq for Expr {
    fn eq(&self, other: &Expr) -> bool {
        self.kind == other.kind
    }
}

/// The kind of an expression, with its operands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    /// An integer literal; without a type where C++ converts it to the type of its neighbour.
    Int {
        value: u64,
        hex: bool,
    },
    /// The digits of a float literal, without suffix.
    Float(String),
    Bool(bool),
    /// A local variable, an argument, a const generic or a constant table, by its C++ name.
    Name {
        name: String,
        of: NameOf,
    },
    Not(Box<Expr>),
    Neg(Box<Expr>),
    Binary(Binary, Box<Expr>, Box<Expr>),
    Cast(Box<Expr>, Scalar),
    Index(Box<Expr>, Box<Expr>),
    Field(Box<Expr>, String),
    /// A call of a device function, an intrinsic or a function of the prelude.
    Call(Call),
    /// A constant of a type: `f32::INFINITY`, `T::MAX`.
    Limit(Type, String),
    Array(Vec<Expr>),
    Repeat(Box<Expr>, Box<Expr>),
    Choose(Box<Expr>, Box<Expr>, Box<Expr>),
    /// An expression that was refused: printing never sees it.
    Invalid,
}

/// The kind of value that a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameOf {
    /// A variable that nothing assigns to.
    Fixed,
    /// A `#[params]` struct, which lies in constant memory.
    Params,
    /// A `let mut` variable.
    Mutable,
    /// Known when an instance is compiled: const generics and `#[constant]`s.
    Const,
}

/// The function that is called.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Callee {
    /// A device function, by its C++ name.
    Device(String),
    /// A function of the preludes: an intrinsic, a method or a conversion.
    Prelude(&'static str),
}

impl Callee {
    /// The name in C++.
    pub(crate) fn name(&self) -> &str {
        match self {
            Callee::Device(name) => name,
            Callee::Prelude(name) => name,
        }
    }
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) callee: Callee,
    /// The function takes the context of the thread first.
    pub(crate) context: bool,
    pub(crate) generics: Vec<Generic>,
    pub(crate) arguments: Vec<Expr>,
}

/// A binary operator; the same sign in Rust and C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Rem,
    Shl,
    Shr,
    BitAnd,
    BitXor,
    BitOr,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    And,
    Or,
}

impl Binary {
    pub(crate) fn sign(self) -> &'static str {
        match self {
            Binary::Add => "+",
            Binary::Sub => "-",
            Binary::Mul => "*",
            Binary::Div => "/",
            Binary::Rem => "%",
            Binary::Shl => "<<",
            Binary::Shr => ">>",
            Binary::BitAnd => "&",
            Binary::BitXor => "^",
            Binary::BitOr => "|",
            Binary::Eq => "==",
            Binary::Ne => "!=",
            Binary::Lt => "<",
            Binary::Le => "<=",
            Binary::Gt => ">",
            Binary::Ge => ">=",
            Binary::And => "&&",
            Binary::Or => "||",
        }
    }

    pub(crate) fn is_comparison(self) -> bool {
        matches!(self, Binary::Eq | Binary::Ne | Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge)
    }

    pub(crate) fn is_shift(self) -> bool {
        matches!(self, Binary::Shl | Binary::Shr)
    }

    pub(crate) fn is_bitwise(self) -> bool {
        matches!(self, Binary::BitAnd | Binary::BitXor | Binary::BitOr)
    }

    /// How tightly the operator binds in C++.
    pub(crate) fn precedence(self) -> u8 {
        match self {
            Binary::Mul | Binary::Div | Binary::Rem => 11,
            Binary::Add | Binary::Sub => 10,
            Binary::Shl | Binary::Shr => 9,
            Binary::Lt | Binary::Le | Binary::Gt | Binary::Ge => 8,
            Binary::Eq | Binary::Ne => 7,
            Binary::BitAnd => 6,
            Binary::BitXor => 5,
            Binary::BitOr => 4,
            Binary::And => 3,
            Binary::Or => 2,
        }
    }
}

impl Expr {
    pub(crate) fn new(kind: Kind, ty: Option<Type>) -> Expr {
        Expr { kind, ty }
    }

    /// The placeholder for an expression that was refused.
    pub(crate) fn invalid() -> Expr {
        Expr::new(Kind::Invalid, None)
    }

    /// The scalar type, where it is known.
    pub(crate) fn scalar(&self) -> Option<Scalar> {
        match self.ty {
            Some(Type::Scalar(scalar)) => Some(scalar),
            _ => None,
        }
    }

    /// Returns true if the expression's integer literals have no type.
    pub(crate) fn is_untyped(&self) -> bool {
        match &self.kind {
            Kind::Int { .. } => self.ty.is_none(),
            Kind::Neg(operand) => operand.is_untyped(),
            Kind::Choose(_, a, b) => a.is_untyped() && b.is_untyped(),
            Kind::Array(elements) => elements.iter().all(Expr::is_untyped),
            Kind::Repeat(value, _) => value.is_untyped(),
            _ => false,
        }
    }

    /// Returns true if the value is known to be an integer. An untyped literal is one: float literals always
    /// have a type.
    pub(crate) fn is_integer(&self) -> bool {
        self.is_untyped() || self.scalar().is_some_and(Scalar::is_integer)
    }

    /// Returns true if the value is known when an instance is compiled.
    pub(crate) fn is_const(&self) -> bool {
        match &self.kind {
            Kind::Int { .. } | Kind::Float(_) | Kind::Bool(_) | Kind::Limit(..) => true,
            Kind::Name { of, .. } => *of == NameOf::Const,
            Kind::Not(operand) | Kind::Neg(operand) | Kind::Cast(operand, _) => operand.is_const(),
            Kind::Binary(_, left, right) => left.is_const() && right.is_const(),
            _ => false,
        }
    }

    /// Returns true if the expression may be printed twice: it costs nothing and its value cannot have
    /// changed.
    pub(crate) fn is_fixed(&self) -> bool {
        match &self.kind {
            Kind::Name { of, .. } => *of != NameOf::Mutable,
            Kind::Cast(operand, _) => operand.is_fixed(),
            Kind::Field(base, _) => base.is_fixed(),
            // The position of the thread.
            Kind::Call(call) => {
                matches!(call.callee, Callee::Prelude(_)) && call.context && call.arguments.is_empty()
            }
            _ => self.is_const(),
        }
    }
}
