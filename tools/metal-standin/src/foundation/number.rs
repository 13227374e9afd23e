//! NSNumber.

use std::ffi::{c_char, c_longlong, c_short, c_uchar, c_uint, c_ulonglong, c_ushort};

use objc2::rc::Retained;
use objc2::runtime::{AnyObject, NSObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_foundation::NSString;

use crate::object::object;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Signed(i64, &'static [u8]),
    Unsigned(u64, &'static [u8]),
    Float(f64, &'static [u8]),
}

macro_rules! numbers {
    ($($make:ident, $get:ident, $ty:ty, $kind:ident as $wide:ty, $encoding:literal;)*) => {
        define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(NSObject))]
            #[name = "NSNumber"]
            #[ivars = Value]
            pub(crate) struct Number;

            #[allow(non_snake_case, reason = "selectors of Apple's")]
            impl Number {
                #[unsafe(method_id(numberWithBool:))]
                fn numberWithBool(value: bool) -> Retained<Self> {
                    object(Value::Signed(i64::from(value), b"c\0"))
                }
                #[unsafe(method(boolValue))]
                fn boolValue(&self) -> bool {
                    match *self.ivars() {
                        Value::Signed(v, _) => v != 0,
                        Value::Unsigned(v, _) => v != 0,
                        Value::Float(v, _) => v != 0.0,
                    }
                }
                $(
                    #[unsafe(method_id($make:))]
                    fn $make(value: $ty) -> Retained<Self> {
                        object(Value::$kind(value as $wide, $encoding))
                    }
                    #[unsafe(method($get))]
                    fn $get(&self) -> $ty {
                        match *self.ivars() {
                            Value::Signed(v, _) => v as $ty,
                            Value::Unsigned(v, _) => v as $ty,
                            Value::Float(v, _) => v as $ty,
                        }
                    }
                )*
                #[unsafe(method(objCType))]
                fn objCType(&self) -> *const c_char {
                    let (Value::Signed(_, e) | Value::Unsigned(_, e) | Value::Float(_, e)) = *self.ivars();
                    e.as_ptr().cast()
                }
                #[unsafe(method_id(stringValue))]
                fn stringValue(&self) -> Retained<NSString> {
                    NSString::from_str(&self.text())
                }
                #[unsafe(method_id(description))]
                fn description(&self) -> Retained<NSString> {
                    NSString::from_str(&self.text())
                }
                #[unsafe(method(isEqual:))]
                fn is_equal(&self, other: Option<&AnyObject>) -> bool {
                    other.is_some_and(|o| o.class() == Self::class() && number(o).text() == self.text())
                }
                #[unsafe(method(isEqualToNumber:))]
                fn equals(&self, other: &AnyObject) -> bool {
                    number(other).text() == self.text()
                }
                #[unsafe(method(hash))]
                fn hash(&self) -> usize {
                    self.text().bytes().fold(0, |h: usize, b| h.wrapping_mul(31).wrapping_add(usize::from(b)))
                }
            }
        );
    };
}

numbers! {
    numberWithChar, charValue, c_char, Signed as i64, b"c\0";
    numberWithUnsignedChar, unsignedCharValue, c_uchar, Unsigned as u64, b"C\0";
    numberWithShort, shortValue, c_short, Signed as i64, b"s\0";
    numberWithUnsignedShort, unsignedShortValue, c_ushort, Unsigned as u64, b"S\0";
    numberWithInt, intValue, i32, Signed as i64, b"i\0";
    numberWithUnsignedInt, unsignedIntValue, c_uint, Unsigned as u64, b"I\0";
    numberWithLongLong, longLongValue, c_longlong, Signed as i64, b"q\0";
    numberWithUnsignedLongLong, unsignedLongLongValue, c_ulonglong, Unsigned as u64, b"Q\0";
    numberWithInteger, integerValue, isize, Signed as i64, b"q\0";
    numberWithUnsignedInteger, unsignedIntegerValue, usize, Unsigned as u64, b"Q\0";
    numberWithFloat, floatValue, f32, Float as f64, b"f\0";
    numberWithDouble, doubleValue, f64, Float as f64, b"d\0";
}

fn number(object: &AnyObject) -> &Number {
    crate::object::ours(object)
}

impl Number {
    fn text(&self) -> String {
        match *self.ivars() {
            Value::Signed(v, _) => v.to_string(),
            Value::Unsigned(v, _) => v.to_string(),
            Value::Float(v, _) => v.to_string(),
        }
    }
}

/// The text of an NSString or an NSNumber, None for other objects.
pub(crate) fn display(object: &AnyObject) -> Option<String> {
    if object.class() == Number::class() {
        return Some(number(object).text());
    }
    (object.class() == NSString::class()).then(|| {
        // SAFETY: the object is of this class.
        unsafe { &*std::ptr::from_ref(object).cast::<NSString>() }.to_string()
    })
}
