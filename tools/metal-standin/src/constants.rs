//! MTLFunctionConstantValues.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;

use flashtile_msl_standin::{FunctionConstant, Library, Value};
use objc2::rc::{Allocated, Retained};
use objc2::runtime::NSObject;
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSRange, NSString};
use objc2_metal::{MTLDataType, MTLFunctionConstantValues};

use crate::machine::{invalid, lock};
use crate::object::{initialized, ours};

/// The constant that a value is set for.
pub(crate) enum Key {
    Index(usize),
    Name(String),
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLFunctionConstantValues"]
    #[ivars = Mutex<Vec<(Key, Value)>>]
    pub(crate) struct Constants;

    impl Constants {
        #[unsafe(method_id(init))]
        fn init(this: Allocated<Self>) -> Retained<Self> {
            initialized(this, Mutex::default())
        }

        #[unsafe(method(setConstantValue:type:atIndex:))]
        fn set(&self, value: NonNull<c_void>, ty: MTLDataType, index: usize) {
            self.add(Key::Index(index), value, ty);
        }

        #[unsafe(method(setConstantValues:type:withRange:))]
        fn set_range(&self, values: NonNull<c_void>, ty: MTLDataType, range: NSRange) {
            for i in 0..range.length {
                // SAFETY: the caller passes a value for each index of the range.
                let value = unsafe { values.byte_add(i * bytes_of(ty)) };
                self.add(Key::Index(range.location + i), value, ty);
            }
        }

        #[unsafe(method(setConstantValue:type:withName:))]
        fn set_name(&self, value: NonNull<c_void>, ty: MTLDataType, name: &NSString) {
            self.add(Key::Name(name.to_string()), value, ty);
        }

        #[unsafe(method(reset))]
        fn reset(&self) {
            lock(self.ivars()).clear();
        }
    }
);

impl Constants {
    fn add(&self, key: Key, value: NonNull<c_void>, ty: MTLDataType) {
        // SAFETY: the caller passes a value of this type.
        let value = unsafe { read(value.as_ptr(), ty) };
        lock(self.ivars()).push((key, value));
    }
}

/// Values for the constants that a library declares, in the order of their indices. Values of others are left out: one object may
/// serve several libraries.
pub(crate) fn values_for(library: &Library, values: &MTLFunctionConstantValues) -> Vec<FunctionConstant> {
    let set = lock(ours::<Constants, _>(values).ivars());
    let mut found = Vec::new();
    for declared in library.constants() {
        let is_it = |key: &Key| match key {
            Key::Index(index) => *index == declared.index as usize,
            Key::Name(name) => *name == declared.name,
        };
        // The last value counts.
        if let Some((_, value)) = set.iter().rev().find(|(key, _)| is_it(key)) {
            found.push(FunctionConstant::new(declared.index, *value));
        }
    }
    found
}

fn bytes_of(ty: MTLDataType) -> usize {
    match ty {
        MTLDataType::Bool | MTLDataType::Char | MTLDataType::UChar => 1,
        MTLDataType::Short | MTLDataType::UShort | MTLDataType::Half => 2,
        MTLDataType::Int | MTLDataType::UInt | MTLDataType::Float => 4,
        MTLDataType::Long | MTLDataType::ULong => 8,
        other => invalid!("a function constant of data type {}, which is no scalar", other.0),
    }
}

/// # Safety
/// A value of the type is there.
unsafe fn read(at: *const c_void, ty: MTLDataType) -> Value {
    // SAFETY: the caller's promise; hosts need not align values.
    unsafe {
        match ty {
            MTLDataType::Bool => Value::Bool(at.cast::<u8>().read() != 0),
            MTLDataType::Char => Value::I8(at.cast::<i8>().read()),
            MTLDataType::UChar => Value::U8(at.cast::<u8>().read()),
            MTLDataType::Short => Value::I16(at.cast::<i16>().read_unaligned()),
            MTLDataType::UShort => Value::U16(at.cast::<u16>().read_unaligned()),
            MTLDataType::Int => Value::I32(at.cast::<i32>().read_unaligned()),
            MTLDataType::UInt => Value::U32(at.cast::<u32>().read_unaligned()),
            MTLDataType::Long => Value::I64(at.cast::<i64>().read_unaligned()),
            MTLDataType::ULong => Value::U64(at.cast::<u64>().read_unaligned()),
            MTLDataType::Float => Value::F32(at.cast::<f32>().read_unaligned()),
            MTLDataType::Half => Value::F16Bits(at.cast::<u16>().read_unaligned()),
            other => invalid!("a function constant of data type {}, which is no scalar", other.0),
        }
    }
}

/// The data type of a constant that a program declares.
pub(crate) fn data_type(name: &str) -> MTLDataType {
    match name {
        "bool" => MTLDataType::Bool,
        "char" => MTLDataType::Char,
        "uchar" => MTLDataType::UChar,
        "short" => MTLDataType::Short,
        "ushort" => MTLDataType::UShort,
        "int" => MTLDataType::Int,
        "uint" => MTLDataType::UInt,
        "long" => MTLDataType::Long,
        "ulong" => MTLDataType::ULong,
        "float" => MTLDataType::Float,
        "half" => MTLDataType::Half,
        _ => MTLDataType::None,
    }
}
