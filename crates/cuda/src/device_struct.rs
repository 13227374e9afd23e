//! Structs that host and device share: declared once, in Rust, and printed as C++ for the native kernels.

/// A type that fields of such a struct may have.
pub(crate) trait DeviceField {
    /// The declaration of a field in C++, without its semicolon.
    fn declaration(name: &str) -> String;
}

macro_rules! scalars {
    ($($rust:ty => $cpp:literal),*) => {$(
        impl DeviceField for $rust {
            fn declaration(name: &str) -> String {
                format!("{} {name}", $cpp)
            }
        }
    )*};
}
scalars!(u32 => "u32", i32 => "i32", u64 => "u64", i64 => "i64", f32 => "float");

impl<T: DeviceField, const N: usize> DeviceField for [T; N] {
    fn declaration(name: &str) -> String {
        T::declaration(&format!("{name}[{N}]"))
    }
}

/// Declares a struct with C layout and no padding, and its `device_source`: the same struct in C++, with an assertion of its size.
///
/// Fields are [`DeviceField`]s, whose sizes and alignments are the same on both sides. A struct with a gap does not compile: name it as a
/// field `unused`.
macro_rules! device_struct {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $($(#[$field_meta:meta])* $field_vis:vis $field:ident: $ty:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        $vis struct $name {
            $($(#[$field_meta])* $field_vis $field: $ty,)*
        }

        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$ty>())*, "a gap between fields");

        impl $crate::device_struct::DeviceField for $name {
            fn declaration(name: &str) -> String {
                format!("{} {name}", stringify!($name))
            }
        }

        impl $name {
            /// The struct in C++.
            $vis fn device_source() -> String {
                let fields = [$(<$ty as $crate::device_struct::DeviceField>::declaration(stringify!($field))),*];
                let fields: String = fields.iter().map(|field| format!("    {field};\n")).collect();
                let (name, bytes) = (stringify!($name), size_of::<Self>());
                format!("struct {name} {{\n{fields}}};\nstatic_assert(sizeof({name}) == {bytes});\n")
            }
        }
    };
}
pub(crate) use device_struct;

#[cfg(test)]
mod tests {
    device_struct! {
        /// A point.
        #[derive(Debug)]
        struct Point {
            /// Where.
            at: [f32; 2],
        }
    }

    device_struct! {
        #[derive(Debug)]
        struct Shape {
            points: [Point; 3],
            unused: u32,
            id: u32,
            offset: i64,
        }
    }

    #[test]
    fn structs_are_printed_as_they_are_declared() {
        assert_eq!(
            Point::device_source() + &Shape::device_source(),
            "struct Point {\n    float at[2];\n};\nstatic_assert(sizeof(Point) == 8);\n\
             struct Shape {\n    Point points[3];\n    u32 unused;\n    u32 id;\n    i64 offset;\n};\n\
             static_assert(sizeof(Shape) == 40);\n"
        );
    }
}
