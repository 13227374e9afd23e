// Written by flashtile VERSION (flashtile kernels export): do not edit.

import Foundation
import Metal

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

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// Parameters of kernels: 56 bytes, aligned to 8, as Metal lays them out.
    public struct Mask: Sendable {
        /// `strides` of the kernel, at byte 0.
        public var strides: (UInt64, UInt64, UInt64)
        /// `step` of the kernel, at byte 24.
        public var step: UInt32
        /// `kind` of the kernel, at byte 28.
        public var kind: UInt32
        /// `heads` of the kernel, at byte 32.
        public var heads: UInt32
        /// `queries` of the kernel, at byte 36.
        public var queries: UInt32
        /// `keys` of the kernel, at byte 40.
        public var keys: UInt32
        /// `rows` of the kernel, at byte 44.
        public var rows: UInt32
        /// `columns` of the kernel, at byte 48.
        public var columns: UInt32
        /// `unused` of the kernel, at byte 52.
        public var unused: UInt32

        public init(
            strides: (UInt64, UInt64, UInt64) = (0, 0, 0),
            step: UInt32 = 0,
            kind: UInt32 = 0,
            heads: UInt32 = 0,
            queries: UInt32 = 0,
            keys: UInt32 = 0,
            rows: UInt32 = 0,
            columns: UInt32 = 0,
            unused: UInt32 = 0
        ) {
            self.strides = strides
            self.step = step
            self.kind = kind
            self.heads = heads
            self.queries = queries
            self.keys = keys
            self.rows = rows
            self.columns = columns
            self.unused = unused
        }
    }
}

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// Parameters of kernels: 40 bytes, aligned to 8, as Metal lays them out.
    public struct Merge: Sendable {
        /// `out` of the kernel, at byte 0.
        public var out: (UInt64, UInt64, UInt64)
        /// `q_heads` of the kernel, at byte 24.
        public var qHeads: UInt32
        /// `queries` of the kernel, at byte 28.
        public var queries: UInt32
        /// `splits` of the kernel, at byte 32.
        public var splits: UInt32
        /// `simds` of the kernel, at byte 36.
        public var simds: UInt32

        public init(
            out: (UInt64, UInt64, UInt64) = (0, 0, 0),
            qHeads: UInt32 = 0,
            queries: UInt32 = 0,
            splits: UInt32 = 0,
            simds: UInt32 = 0
        ) {
            self.out = out
            self.qHeads = qHeads
            self.queries = queries
            self.splits = splits
            self.simds = simds
        }
    }
}

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// Throws where this compiler lays out a structure of parameters differently than Metal.
    fileprivate static func checkLayouts() throws {
        try checkLayout(
            of: Mask.self, bytes: 56, alignment: 8,
            offsets: [
                (MemoryLayout<Mask>.offset(of: \.strides), 0),
                (MemoryLayout<Mask>.offset(of: \.step), 24),
                (MemoryLayout<Mask>.offset(of: \.kind), 28),
                (MemoryLayout<Mask>.offset(of: \.heads), 32),
                (MemoryLayout<Mask>.offset(of: \.queries), 36),
                (MemoryLayout<Mask>.offset(of: \.keys), 40),
                (MemoryLayout<Mask>.offset(of: \.rows), 44),
                (MemoryLayout<Mask>.offset(of: \.columns), 48),
                (MemoryLayout<Mask>.offset(of: \.unused), 52),
            ])
        try checkLayout(
            of: Merge.self, bytes: 40, alignment: 8,
            offsets: [
                (MemoryLayout<Merge>.offset(of: \.out), 0),
                (MemoryLayout<Merge>.offset(of: \.qHeads), 24),
                (MemoryLayout<Merge>.offset(of: \.queries), 28),
                (MemoryLayout<Merge>.offset(of: \.splits), 32),
                (MemoryLayout<Merge>.offset(of: \.simds), 36),
            ])
    }
}

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// Adds up the partial results of every row:
    /// ```text
    /// row_max = max_i row_max_i                       row_sum = sum_i 2^(row_max_i - row_max) row_sum_i
    /// out     = simds sum_i 2^(row_max_i - row_max) partial_out_i / row_sum
    /// lse     = ln 2 (row_max + log2 row_sum) + shift
    /// ```
    /// `partial_max_sum` holds the pairs `(row_max_i, row_sum_i)`, and with ALiBi the shift of every row behind them: what
    /// was subtracted from its scores so that f32 keeps their digits. The grid is (queries, heads, batch entries). With a
    /// Hadamard order, `out` is rotated back.
    public struct MergeKernel {
        /// The kernel with its generics fixed, by the name of its function.
        public enum Instance: String, CaseIterable, Sendable {
            case merge_bf16_128_0

            /// Its generics, and what a threadgroup of it takes.
            public var traits: Traits {
                switch self {
                case .merge_bf16_128_0:
                    return Traits(q: .bf16, dv: 128, order: 0, maxThreads: 128, hasExactThreads: true, threadgroupBytes: 2560)
                }
            }
        }

        /// The generics of an instance, and what a threadgroup of it takes.
        public struct Traits: Sendable {
            /// `Q`.
            public let q: Element
            /// `DV`.
            public let dv: Int
            /// `ORDER`.
            public let order: Int
            /// The threads of a threadgroup, at most.
            public let maxThreads: Int
            /// Whether a threadgroup has exactly these; otherwise any multiple of 32 up to them.
            public let hasExactThreads: Bool
            /// Bytes of threadgroup memory.
            public let threadgroupBytes: Int
        }

        /// What a pipeline fixes: its function constants.
        public struct Constants: Sendable {
            /// `has_sinks`: `[[function_constant(0)]]`.
            public var hasSinks: Bool
            /// `with_lse`: `[[function_constant(1)]]`.
            public var withLse: Bool
            /// `has_shift`: `[[function_constant(2)]]`.
            public var hasShift: Bool

            public init(
                hasSinks: Bool,
                withLse: Bool,
                hasShift: Bool
            ) {
                self.hasSinks = hasSinks
                self.withLse = withLse
                self.hasShift = hasShift
            }
        }

        /// What a launch is given. A buffer that the pipeline's constants leave out is bound, and not read: any buffer will do.
        public struct Arguments {
            /// `partial_out`: `[[buffer(0)]]`, elements of `f32`, read.
            public var partialOut: Buffer
            /// `partial_max_sum`: `[[buffer(1)]]`, elements of `f32`, read.
            public var partialMaxSum: Buffer
            /// `factors`: `[[buffer(2)]]`, elements of `f32`, read.
            public var factors: Buffer
            /// `sinks`: `[[buffer(3)]]`, elements of `f32`, read.
            public var sinks: Buffer
            /// `params`: `[[buffer(4)]]`, copied.
            public var params: Merge
            /// `out`: `[[buffer(5)]]`, elements of `Q`, read and written.
            public var out: Buffer
            /// `lse`: `[[buffer(6)]]`, elements of `f32`, read and written.
            public var lse: Buffer

            public init(
                partialOut: Buffer,
                partialMaxSum: Buffer,
                factors: Buffer,
                sinks: Buffer,
                params: Merge,
                out: Buffer,
                lse: Buffer
            ) {
                self.partialOut = partialOut
                self.partialMaxSum = partialMaxSum
                self.factors = factors
                self.sinks = sinks
                self.params = params
                self.out = out
                self.lse = lse
            }
        }

        public let instance: Instance
        public let constants: Constants
        public let state: any MTLComputePipelineState
        /// Threads of a threadgroup.
        public let threads: Int

        /// Compiles an instance, for threadgroups of `threads` threads where the kernel leaves a choice.
        ///
        /// Throws `KernelError` where the device does not run it, and errors of the file system and of Metal.
        public init(
            _ instance: Instance, constants: Constants, library: Library, threads: Int? = nil
        ) throws {
            let traits = instance.traits
            self.instance = instance
            self.constants = constants
            self.threads = try Flashtile.threads(
                threads, of: instance.rawValue, atMost: traits.maxThreads, exactly: traits.hasExactThreads)
            let values = MTLFunctionConstantValues()
            withUnsafeBytes(of: constants.hasSinks) {
                values.setConstantValue($0.baseAddress!, type: .bool, index: 0)
            }
            withUnsafeBytes(of: constants.withLse) {
                values.setConstantValue($0.baseAddress!, type: .bool, index: 1)
            }
            withUnsafeBytes(of: constants.hasShift) {
                values.setConstantValue($0.baseAddress!, type: .bool, index: 2)
            }
            state = try library.pipeline(
                instance.rawValue, constants: values, threads: self.threads,
                threadgroupBytes: traits.threadgroupBytes)
        }

        /// Encodes a launch of `groups` threadgroups.
        ///
        /// The grid is (queries, heads, batch entries).
        ///
        /// Throws `KernelError`, before anything is encoded, where a condition of the kernel does not hold.
        /// These conditions are not checked here; where one does not hold, the kernel may read or write outside of its buffers:
        ///
        /// - a factor for each coordinate, and a root for each block: `ORDER == 0 || factors.len() >= DV + block_count(ORDER, DV)`
        /// - out reaches to its last row: `params.reach(groups, DV).is_some_and(|needed| out.len() >= needed)`
        public func encode(
            _ arguments: Arguments, groups: MTLSize, into encoder: any MTLComputeCommandEncoder
        ) throws {
            try Flashtile.requireGrid(groups, "merge")
            let traits = instance.traits
            let partialOutCount = try arguments.partialOut.count(
                of: .f32, kernel: "merge", name: "partial_out")
            let partialMaxSumCount = try arguments.partialMaxSum.count(
                of: .f32, kernel: "merge", name: "partial_max_sum")
            _ = try arguments.factors.count(
                of: .f32, kernel: "merge", name: "factors")
            let sinksCount = try arguments.sinks.count(
                of: .f32, kernel: "merge", name: "sinks")
            _ = try arguments.out.count(
                of: traits.q, kernel: "merge", name: "out")
            let lseCount = try arguments.lse.count(
                of: .f32, kernel: "merge", name: "lse")
            try Flashtile.require(
                partialOutCount >= times(times(count(groups), Int(clamping: arguments.params.splits)), traits.dv),
                "merge", "a partial output of every split", "partial_out.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * DV")
            try Flashtile.require(
                partialMaxSumCount >= times(times(count(groups), Int(clamping: arguments.params.splits)), 2),
                "merge", "a maximum and a sum of every split", "partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * params.splits as usize * 2")
            try Flashtile.require(
                groups.width == Int(clamping: arguments.params.queries) && groups.height == Int(clamping: arguments.params.qHeads),
                "merge", "a threadgroup for each row", "groups[0] == params.queries && groups[1] == params.q_heads")
            try Flashtile.require(
                !constants.hasShift || partialMaxSumCount >= times(count(groups), plus(times(Int(clamping: arguments.params.splits), 2), 1)),
                "merge", "a shift of every row", "!has_shift || partial_max_sum.len() >= groups.iter().map(|n| *n as usize).product::<usize>() * (params.splits as usize * 2 + 1)")
            try Flashtile.require(
                Int(clamping: arguments.params.splits) > 0,
                "merge", "there are splits", "params.splits > 0")
            try Flashtile.require(
                !constants.hasSinks || sinksCount >= groups.height,
                "merge", "a sink for each head", "!has_sinks || sinks.len() >= groups[1] as usize")
            try Flashtile.require(
                !constants.withLse || lseCount >= count(groups),
                "merge", "a logsumexp for each row", "!with_lse || lse.len() >= groups.iter().map(|n| *n as usize).product::<usize>()")
            encoder.setComputePipelineState(state)
            encoder.setBuffer(arguments.partialOut.buffer, offset: arguments.partialOut.offset, index: 0)
            encoder.setBuffer(arguments.partialMaxSum.buffer, offset: arguments.partialMaxSum.offset, index: 1)
            encoder.setBuffer(arguments.factors.buffer, offset: arguments.factors.offset, index: 2)
            encoder.setBuffer(arguments.sinks.buffer, offset: arguments.sinks.offset, index: 3)
            withUnsafeBytes(of: arguments.params) {
                encoder.setBytes($0.baseAddress!, length: $0.count, index: 4)
            }
            encoder.setBuffer(arguments.out.buffer, offset: arguments.out.offset, index: 5)
            encoder.setBuffer(arguments.lse.buffer, offset: arguments.lse.offset, index: 6)
            encoder.dispatchThreadgroups(
                groups, threadsPerThreadgroup: MTLSize(width: threads, height: 1, depth: 1))
        }
    }
}

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// Rotates rows `[rows, D]` into `out`, or back: the transform of the codecs by itself.
    public struct HadamardKernel {
        /// The kernel with its generics fixed, by the name of its function.
        public enum Instance: String, CaseIterable, Sendable {
            case hadamard_128

            /// Its generics, and what a threadgroup of it takes.
            public var traits: Traits {
                switch self {
                case .hadamard_128:
                    return Traits(d: 128, order: 1, maxThreads: 128, hasExactThreads: true, threadgroupBytes: 2048)
                }
            }
        }

        /// The generics of an instance, and what a threadgroup of it takes.
        public struct Traits: Sendable {
            /// `D`.
            public let d: Int
            /// `ORDER`.
            public let order: Int
            /// The threads of a threadgroup, at most.
            public let maxThreads: Int
            /// Whether a threadgroup has exactly these; otherwise any multiple of 32 up to them.
            public let hasExactThreads: Bool
            /// Bytes of threadgroup memory.
            public let threadgroupBytes: Int
        }

        /// What a pipeline fixes: its function constants.
        public struct Constants: Sendable {
            /// `back`: `[[function_constant(0)]]`.
            public var back: Bool

            public init(
                back: Bool
            ) {
                self.back = back
            }
        }

        /// What a launch is given. A buffer that the pipeline's constants leave out is bound, and not read: any buffer will do.
        public struct Arguments {
            /// `x`: `[[buffer(0)]]`, elements of `f32`, read.
            public var x: Buffer
            /// `factors`: `[[buffer(1)]]`, elements of `f32`, read.
            public var factors: Buffer
            /// `out`: `[[buffer(2)]]`, elements of `f32`, read and written.
            public var out: Buffer
            /// `rows`: `[[buffer(3)]]`, copied.
            public var rows: UInt32

            public init(
                x: Buffer,
                factors: Buffer,
                out: Buffer,
                rows: UInt32
            ) {
                self.x = x
                self.factors = factors
                self.out = out
                self.rows = rows
            }
        }

        public let instance: Instance
        public let constants: Constants
        public let state: any MTLComputePipelineState
        /// Threads of a threadgroup.
        public let threads: Int

        /// Compiles an instance, for threadgroups of `threads` threads where the kernel leaves a choice.
        ///
        /// Throws `KernelError` where the device does not run it, and errors of the file system and of Metal.
        public init(
            _ instance: Instance, constants: Constants, library: Library, threads: Int? = nil
        ) throws {
            let traits = instance.traits
            self.instance = instance
            self.constants = constants
            self.threads = try Flashtile.threads(
                threads, of: instance.rawValue, atMost: traits.maxThreads, exactly: traits.hasExactThreads)
            let values = MTLFunctionConstantValues()
            withUnsafeBytes(of: constants.back) {
                values.setConstantValue($0.baseAddress!, type: .bool, index: 0)
            }
            state = try library.pipeline(
                instance.rawValue, constants: values, threads: self.threads,
                threadgroupBytes: traits.threadgroupBytes)
        }

        /// Encodes a launch of `groups` threadgroups.
        ///
        /// Throws `KernelError`, before anything is encoded, where a condition of the kernel does not hold.
        /// These conditions are not checked here; where one does not hold, the kernel may read or write outside of its buffers:
        ///
        /// - a factor for each coordinate, and a root for each block: `factors.len() >= D + block_count(ORDER, D)`
        public func encode(
            _ arguments: Arguments, groups: MTLSize, into encoder: any MTLComputeCommandEncoder
        ) throws {
            try Flashtile.requireGrid(groups, "hadamard")
            let traits = instance.traits
            let xCount = try arguments.x.count(
                of: .f32, kernel: "hadamard", name: "x")
            _ = try arguments.factors.count(
                of: .f32, kernel: "hadamard", name: "factors")
            let outCount = try arguments.out.count(
                of: .f32, kernel: "hadamard", name: "out")
            try Flashtile.require(
                xCount >= times(Int(clamping: arguments.rows), traits.d) && outCount >= times(Int(clamping: arguments.rows), traits.d),
                "hadamard", "x and out hold the rows", "x.len() >= rows as usize * D && out.len() >= rows as usize * D")
            try Flashtile.require(
                groups.width >= dividedUp(Int(clamping: arguments.rows), 4),
                "hadamard", "a SIMD group for each row", "groups[0] as usize >= (rows as usize).div_ceil(4)")
            encoder.setComputePipelineState(state)
            encoder.setBuffer(arguments.x.buffer, offset: arguments.x.offset, index: 0)
            encoder.setBuffer(arguments.factors.buffer, offset: arguments.factors.offset, index: 1)
            encoder.setBuffer(arguments.out.buffer, offset: arguments.out.offset, index: 2)
            withUnsafeBytes(of: arguments.rows) {
                encoder.setBytes($0.baseAddress!, length: $0.count, index: 3)
            }
            encoder.dispatchThreadgroups(
                groups, threadsPerThreadgroup: MTLSize(width: threads, height: 1, depth: 1))
        }
    }
}

@available(macOS 14.0, iOS 17.0, tvOS 17.0, visionOS 1.0, *)
extension Flashtile {
    /// One byte for each block of a mask: 0 where it hides all of the block's keys from all of its queries, 2 where it adds
    /// nothing to any score, 1 otherwise. Threadgroups are (blocks of keys, blocks of queries, sequences times heads);
    /// `mask_tiles` is `[z, y, x]` of them.
    public struct MaskTilesKernel {
        /// The kernel with its generics fixed, by the name of its function.
        public enum Instance: String, CaseIterable, Sendable {
            case mask_tiles

            /// Its generics, and what a threadgroup of it takes.
            public var traits: Traits {
                switch self {
                case .mask_tiles:
                    return Traits(maxThreads: 128, hasExactThreads: true, threadgroupBytes: 16)
                }
            }
        }

        /// The generics of an instance, and what a threadgroup of it takes.
        public struct Traits: Sendable {
            /// The threads of a threadgroup, at most.
            public let maxThreads: Int
            /// Whether a threadgroup has exactly these; otherwise any multiple of 32 up to them.
            public let hasExactThreads: Bool
            /// Bytes of threadgroup memory.
            public let threadgroupBytes: Int
        }

        /// What a launch is given. A buffer that the pipeline's constants leave out is bound, and not read: any buffer will do.
        public struct Arguments {
            /// `mask`: `[[buffer(0)]]`, elements of `u8`, read.
            public var mask: Buffer
            /// `params`: `[[buffer(1)]]`, copied.
            public var params: Mask
            /// `mask_tiles`: `[[buffer(2)]]`, elements of `u8`, read and written.
            public var maskTiles: Buffer

            public init(
                mask: Buffer,
                params: Mask,
                maskTiles: Buffer
            ) {
                self.mask = mask
                self.params = params
                self.maskTiles = maskTiles
            }
        }

        public let instance: Instance
        public let state: any MTLComputePipelineState
        /// Threads of a threadgroup.
        public let threads: Int

        /// Compiles an instance, for threadgroups of `threads` threads where the kernel leaves a choice.
        ///
        /// Throws `KernelError` where the device does not run it, and errors of the file system and of Metal.
        public init(
            _ instance: Instance, library: Library, threads: Int? = nil
        ) throws {
            let traits = instance.traits
            self.instance = instance
            self.threads = try Flashtile.threads(
                threads, of: instance.rawValue, atMost: traits.maxThreads, exactly: traits.hasExactThreads)
            let values = MTLFunctionConstantValues()
            state = try library.pipeline(
                instance.rawValue, constants: values, threads: self.threads,
                threadgroupBytes: traits.threadgroupBytes)
        }

        /// Encodes a launch of `groups` threadgroups.
        ///
        /// Threadgroups are (blocks of keys, blocks of queries, sequences times heads); `mask_tiles` is `[z, y, x]` of them.
        ///
        /// Throws `KernelError`, before anything is encoded, where a condition of the kernel does not hold.
        /// These conditions are not checked here; where one does not hold, the kernel may read or write outside of its buffers:
        ///
        /// - mask reaches to its last element: `params.reach(groups[2]).is_some_and(|needed| mask.len() >= needed)`
        public func encode(
            _ arguments: Arguments, groups: MTLSize, into encoder: any MTLComputeCommandEncoder
        ) throws {
            try Flashtile.requireGrid(groups, "mask_tiles")
            _ = try arguments.mask.count(
                of: .u8, kernel: "mask_tiles", name: "mask")
            let maskTilesCount = try arguments.maskTiles.count(
                of: .u8, kernel: "mask_tiles", name: "mask_tiles")
            try Flashtile.require(
                Int(clamping: arguments.params.rows) > 0 && Int(clamping: arguments.params.columns) > 0 && Int(clamping: arguments.params.heads) > 0,
                "mask_tiles", "blocks have rows and columns, a mask a head", "params.rows > 0 && params.columns > 0 && params.heads > 0")
            try Flashtile.require(
                Int(clamping: arguments.params.kind) < 4,
                "mask_tiles", "an element that masks have", "params.kind < 4")
            try Flashtile.require(
                groups.width == dividedUp(Int(clamping: arguments.params.keys), Int(clamping: arguments.params.columns)),
                "mask_tiles", "a group for each block of keys", "groups[0] == params.keys.div_ceil(params.columns)")
            try Flashtile.require(
                groups.height == dividedUp(Int(clamping: arguments.params.queries), Int(clamping: arguments.params.rows)),
                "mask_tiles", "a group for each block of queries", "groups[1] == params.queries.div_ceil(params.rows)")
            try Flashtile.require(
                isMultiple(groups.depth, Int(clamping: arguments.params.heads)),
                "mask_tiles", "all heads of every sequence", "groups[2].is_multiple_of(params.heads)")
            try Flashtile.require(
                maskTilesCount >= count(groups),
                "mask_tiles", "a byte for each group", "mask_tiles.len() >= groups.iter().map(|n| *n as usize).product::<usize>()")
            encoder.setComputePipelineState(state)
            encoder.setBuffer(arguments.mask.buffer, offset: arguments.mask.offset, index: 0)
            withUnsafeBytes(of: arguments.params) {
                encoder.setBytes($0.baseAddress!, length: $0.count, index: 1)
            }
            encoder.setBuffer(arguments.maskTiles.buffer, offset: arguments.maskTiles.offset, index: 2)
            encoder.dispatchThreadgroups(
                groups, threadsPerThreadgroup: MTLSize(width: threads, height: 1, depth: 1))
        }
    }
}
