# The CUDA kernels as C++, run by the emulator: suite `cuda` of the Release and of the ASan build. The same sources
# compiled with clang's TSan, which follows fibers well, and linked with the engine of the Release build:
# target cuda_tsan, program cuda_tsan_test, which is built and run by tests/run.sh only.
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  message(WARNING "The CUDA kernels are not tested: the emulator needs an x86-64 processor")
  return()
endif()
if(SHOAL_SANITIZE STREQUAL "thread")
  return()
endif()

shoal_test_folder(cuda cuda)
file(GLOB cuda_test_sources CONFIGURE_DEPENDS cuda/*.cpp)
file(GLOB cuda_emulator_sources CONFIGURE_DEPENDS cuda/emulator/*.cpp)
file(GLOB cuda_standin_sources CONFIGURE_DEPENDS cuda/standin/*.cpp)
# Tests of host code, and stand-ins of libraries, need the toolkit's headers.
set(cuda_host_tests "")
if(CUDAToolkit_FOUND)
  file(GLOB cuda_host_tests CONFIGURE_DEPENDS cuda/host/*_test.cpp)
  list(APPEND cuda_test_sources ${cuda_host_tests})
else()
  list(FILTER cuda_standin_sources INCLUDE REGEX "/(streams|memory|cudart|failures)\\.cpp$")
endif()
if(NOT SHOAL_NCCL_INCLUDE_DIR)
  list(FILTER cuda_host_tests EXCLUDE REGEX "/nccl_")
  list(FILTER cuda_test_sources EXCLUDE REGEX "/nccl_")
  list(FILTER cuda_standin_sources EXCLUDE REGEX "/nccl[^/]*$")
endif()
if(NOT SHOAL_CUDNN_INCLUDE_DIR)
  list(FILTER cuda_host_tests EXCLUDE REGEX "/cudnn_")
  list(FILTER cuda_test_sources EXCLUDE REGEX "/cudnn_")
  list(FILTER cuda_standin_sources EXCLUDE REGEX "/cudnn[^/]*$")
endif()
set_target_properties(cuda_test PROPERTIES UNITY_BUILD OFF)  # stand-ins and emulator define what each other must not see
target_sources(cuda_test PRIVATE ${cuda_host_tests} cuda/main.cpp ${cuda_emulator_sources} ${cuda_standin_sources}
               ${SHOAL_CUDA_SOURCES} ${SHOAL_CUDA_HOST_SOURCES})
target_include_directories(cuda_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/cuda/emulator)
target_include_directories(cuda_test SYSTEM PRIVATE ${SHOAL_CUDA_INCLUDE_DIRS})  # for host code and stand-ins
set_source_files_properties(${SHOAL_CUDA_SOURCES} PROPERTIES LANGUAGE CXX)
if(SHOAL_SANITIZE)  # unlike tests, kernels are checked by UBSan; and fibers are slow without optimisation
  set_source_files_properties(${SHOAL_CUDA_SOURCES} PROPERTIES COMPILE_OPTIONS
    "-O1;-fsanitize=undefined;-fno-sanitize-recover=all")
  set_source_files_properties(${cuda_emulator_sources} PROPERTIES COMPILE_OPTIONS -O1)
endif()

# cuDNN, asked about GPUs that are not here, for the graphs of the backend: no engine of ours in it.
find_library(CUDNN_LIBRARY cudnn HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib)
if(SHOAL_CUDNN_INCLUDE_DIR AND CUDNN_LIBRARY AND NOT SHOAL_SANITIZE)
  set(cuda_folder ${CMAKE_SOURCE_DIR}/core/backend/cuda)
  add_executable(cudnn_test cuda/cudnn/graphs.cpp cuda/cudnn/gpus.cpp ${cuda_folder}/cudnn_graph.cpp
                 ${cuda_folder}/cudnn_library.cpp ${cuda_folder}/cudnn_attention_graphs.cpp $<TARGET_OBJECTS:core>)
  # The library is referred to weakly only.
  target_link_libraries(cudnn_test PRIVATE shoal_flags GTest::gtest nlohmann_json::nlohmann_json PkgConfig::YAMLCPP
                        -Wl,--no-as-needed ${CUDNN_LIBRARY} ${CMAKE_DL_LIBS})
  target_include_directories(cudnn_test SYSTEM PRIVATE ${SHOAL_CUDNN_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(cudnn_test PRIVATE CUDA_DRIVER_STUB="${CUDAToolkit_LIBRARY_DIR}/stubs/libcuda.so")
  add_test(NAME cudnn COMMAND cudnn_test)
  set_tests_properties(cudnn PROPERTIES TIMEOUT 300)
elseif(NOT SHOAL_SANITIZE)
  message(WARNING "cuDNN was not found: whether it takes our layouts is not tested")
endif()

find_program(SHOAL_CLANGXX NAMES clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14)
if(SHOAL_SANITIZE)
  return()
endif()
if(NOT SHOAL_CLANGXX)
  message(WARNING "No clang++ was found: the CUDA kernels are not searched for data races")
  return()
endif()
# Thousands of calls of ranks that are threads: too slow for TSan.
list(FILTER cuda_test_sources EXCLUDE REGEX "/((nccl_)?(communicator|failures)|engine(_memory)?)_test\\.cpp$")
set(tsan_objects "")
set(cuda_header_flags ${SHOAL_CUDA_INCLUDE_DIRS})
list(TRANSFORM cuda_header_flags PREPEND -isystem)
foreach(source IN LISTS SHOAL_CUDA_SOURCES SHOAL_CUDA_HOST_SOURCES cuda_test_sources cuda_emulator_sources
               cuda_standin_sources)
  get_filename_component(name ${source} NAME)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda_tsan/${name}.o)
  set(flags -fsanitize=thread)
  if(source MATCHES "/cuda/(emulator|standin)/")
    set(flags "")  # its own memory is no matter of kernels
  endif()
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda_tsan
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${SHOAL_CLANGXX} -std=c++20 -O1 -g1 -Wall -Wno-unknown-pragmas ${flags}
            -DSHOAL_EMULATOR_TSAN -I${CMAKE_SOURCE_DIR} -I${CMAKE_CURRENT_SOURCE_DIR}/cuda/emulator
            ${cuda_header_flags}
            -MD -MF ${object}.d -x c++ -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "clang++ -fsanitize=thread ${name}" COMMAND_EXPAND_LISTS VERBATIM)
  list(APPEND tsan_objects ${object})
endforeach()
set(tsan_engine $<TARGET_OBJECTS:core> $<TARGET_OBJECTS:cpu_scalar> $<TARGET_OBJECTS:cpu_gemm> $<TARGET_OBJECTS:parallel>)
set(tsan_program ${CMAKE_CURRENT_BINARY_DIR}/cuda_tsan_test)
add_custom_command(OUTPUT ${tsan_program}
  COMMAND ${SHOAL_CLANGXX} -fsanitize=thread -o ${tsan_program} ${tsan_objects} ${tsan_engine}
          $<TARGET_FILE:GTest::gtest> ${YAMLCPP_LINK_LIBRARIES} ${OPENBLAS_LIBRARY} ${MPI_C_LIBRARIES} -lpthread -ldl
  DEPENDS ${tsan_objects} core cpu_scalar cpu_gemm parallel ${tsan_engine}
  COMMENT "linking cuda_tsan_test" COMMAND_EXPAND_LISTS VERBATIM)
add_custom_target(cuda_tsan DEPENDS ${tsan_program})
