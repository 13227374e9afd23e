
#if !arch(arm64) && !arch(x86_64)
#error("The layouts of parameters are those of 64-bit processors.")
#endif

/// flashtile's kernels for Metal: a structure for each kernel, which makes a pipeline of one of its instances and encodes launches.
///
///     let library = try Flashtile.Library(device: device, folder: kernelsFolder)
///
/// compiles sources of this folder. Every kernel is compiled without fast math: infinities and NaN keep their meaning.
@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
public enum Flashtile {
    /// Why a pipeline cannot be made, or a launch cannot be encoded. Errors of Metal are thrown as they are.
    public enum KernelError: Error, CustomStringConvertible, Sendable {
        /// A structure of parameters is laid out differently by this compiler than by Metal.
        case layout(structure: String)
        /// A threadgroup has a number of threads that the kernel is not written for.
        case threads(instance: String, expected: String, found: Int)
        /// The pipeline takes fewer threads a threadgroup on this device.
        case deviceThreads(instance: String, limit: Int, found: Int)
        /// The pipeline has SIMD groups of another width than 32 threads on this device.
        case simdWidth(instance: String, found: Int)
        /// The device has less threadgroup memory.
        case threadgroupMemory(instance: String, limit: Int, found: Int)
        /// The offset of a buffer is outside of it, or no multiple of its alignment in bytes.
        case offset(kernel: String, buffer: String, offset: Int, alignment: Int, length: Int)
        /// The grid has no threadgroup.
        case emptyGrid(kernel: String)
        /// A condition of the kernel does not hold.
        case condition(kernel: String, message: String, condition: String)

        public var description: String {
            switch self {
            case .layout(let structure):
                return "\(structure) has another layout than in Metal"
            case .threads(let instance, let expected, let found):
                return "\(instance): a threadgroup has \(expected) threads, \(found) asked for"
            case .deviceThreads(let instance, let limit, let found):
                return "\(instance): a threadgroup has at most \(limit) threads on this device, \(found) asked for"
            case .simdWidth(let instance, let found):
                return "\(instance): SIMD groups have \(found) threads on this device, expected 32"
            case .threadgroupMemory(let instance, let limit, let found):
                return "\(instance): needs \(found) bytes of threadgroup memory, the device has \(limit)"
            case .offset(let kernel, let buffer, let offset, let alignment, let length):
                return "\(kernel): the offset of \(buffer) is \(offset), expected a multiple of \(alignment) up to \(length)"
            case .emptyGrid(let kernel):
                return "\(kernel): the grid has no threadgroup"
            case .condition(let kernel, let message, let condition):
                return "\(kernel): \(message): \(condition)"
            }
        }
    }

    /// The type of the elements of a buffer, or of a product.
    public enum Element: Sendable {
        case bool, u8, i8, u16, i16, u32, i32, u64, i64, usize, f32, f16, bf16

        /// Bytes of an element.
        public var bytes: Int {
            switch self {
            case .bool, .u8, .i8: return 1
            case .u16, .i16, .f16, .bf16: return 2
            case .u32, .i32, .f32: return 4
            case .u64, .i64, .usize: return 8
            }
        }
    }

    /// A buffer, from an offset in bytes to its end.
    public struct Buffer {
        public var buffer: any MTLBuffer
        public var offset: Int

        public init(_ buffer: any MTLBuffer, offset: Int = 0) {
            self.buffer = buffer
            self.offset = offset
        }

        /// The number of whole elements.
        fileprivate func count(of element: Element, kernel: String, name: String) throws -> Int {
            let (length, alignment) = (buffer.length, element.bytes)
            guard offset >= 0, offset <= length, offset % alignment == 0 else {
                throw KernelError.offset(
                    kernel: kernel, buffer: name, offset: offset, alignment: alignment, length: length)
            }
            return (length - offset) / alignment
        }
    }

    /// Compiles the sources of a folder that `flashtile kernels export` wrote.
    public final class Library {
        public let device: any MTLDevice
        public let folder: URL

        /// Throws `KernelError.layout` where this compiler lays out parameters differently than Metal.
        public init(device: any MTLDevice, folder: URL) throws {
            try Flashtile.checkLayouts()
            self.device = device
            self.folder = folder
        }

        /// A pipeline of the source of an instance. It takes as long as Metal's compiler: keep pipelines.
        fileprivate func pipeline(
            _ instance: String, constants: MTLFunctionConstantValues, threads: Int, threadgroupBytes: Int
        ) throws -> any MTLComputePipelineState {
            let limit = device.maxThreadgroupMemoryLength
            guard threadgroupBytes <= limit else {
                throw KernelError.threadgroupMemory(instance: instance, limit: limit, found: threadgroupBytes)
            }
            let file = folder.appendingPathComponent(instance + ".metal")
            let source = try String(contentsOf: file, encoding: .utf8)
            let options = MTLCompileOptions()
            options.languageVersion = .version3_1
            // The SDK of the first compiler of Swift 6 is the first one with `mathMode`.
            #if compiler(>=6.0)
            if #available(macOS 15.0, iOS 18.0, tvOS 18.0, visionOS 2.0, *) {
                options.mathMode = .safe
            } else {
                options.fastMathEnabled = false
            }
            #else
            options.fastMathEnabled = false
            #endif
            let library = try device.makeLibrary(source: source, options: options)
            let function = try library.makeFunction(name: instance, constantValues: constants)
            let state = try device.makeComputePipelineState(function: function)
            guard threads <= state.maxTotalThreadsPerThreadgroup else {
                let limit = state.maxTotalThreadsPerThreadgroup
                throw KernelError.deviceThreads(instance: instance, limit: limit, found: threads)
            }
            guard state.threadExecutionWidth == 32 else {
                throw KernelError.simdWidth(instance: instance, found: state.threadExecutionWidth)
            }
            return state
        }
    }

    /// Throws where a structure is laid out differently than in Metal.
    fileprivate static func checkLayout<T>(
        of type: T.Type, bytes: Int, alignment: Int, offsets: [(found: Int?, expected: Int)]
    ) throws {
        let size = MemoryLayout<T>.size == bytes && MemoryLayout<T>.stride == bytes
        let aligned = MemoryLayout<T>.alignment == alignment
        guard size, aligned, offsets.allSatisfy({ $0.found == $0.expected }) else {
            throw KernelError.layout(structure: String(describing: type))
        }
    }

    /// The threads of a threadgroup: those asked for, or as many as the kernel may have.
    fileprivate static func threads(
        _ asked: Int?, of instance: String, atMost limit: Int, exactly: Bool
    ) throws -> Int {
        let threads = asked ?? limit
        guard threads > 0, threads % 32 == 0, exactly ? threads == limit : threads <= limit else {
            let expected = exactly ? "\(limit)" : "a multiple of 32 up to \(limit)"
            throw KernelError.threads(instance: instance, expected: expected, found: threads)
        }
        return threads
    }

    fileprivate static func require(
        _ holds: Bool, _ kernel: String, _ message: String, _ condition: String
    ) throws {
        guard holds else {
            throw KernelError.condition(kernel: kernel, message: message, condition: condition)
        }
    }

    fileprivate static func requireGrid(_ groups: MTLSize, _ kernel: String) throws {
        guard groups.width > 0, groups.height > 0, groups.depth > 0 else {
            throw KernelError.emptyGrid(kernel: kernel)
        }
    }
}

// Arithmetic of conditions: sums and products that are too large for an `Int` are the largest one.

private func plus(_ a: Int, _ b: Int) -> Int {
    let (sum, overflow) = a.addingReportingOverflow(b)
    return overflow ? Int.max : sum
}

private func times(_ a: Int, _ b: Int) -> Int {
    let (product, overflow) = a.multipliedReportingOverflow(by: b)
    return overflow ? Int.max : product
}

private func dividedUp(_ a: Int, _ b: Int) -> Int {
    b == 0 ? Int.max : a / b + (a % b == 0 ? 0 : 1)
}

private func isMultiple(_ a: Int, _ b: Int) -> Bool {
    b == 0 ? a == 0 : a % b == 0
}

private func isPowerOfTwo(_ a: Int) -> Bool {
    a > 0 && a & (a - 1) == 0
}

private func count(_ groups: MTLSize) -> Int {
    times(times(groups.width, groups.height), groups.depth)
}
