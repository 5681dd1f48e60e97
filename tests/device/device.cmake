# The tests of tests/cuda that are about kernels, compiled by nvcc and linked with the real libraries: program
# cuda_device_test, which tests/device/run.sh builds and runs on a GPU. Left out are the tests of emulator and stand-ins.
if(NOT COMMAND shoal_add_cuda)
  return()
endif()
file(GLOB device_tests CONFIGURE_DEPENDS cuda/*_test.cpp)
list(FILTER device_tests EXCLUDE REGEX "/(emulator|streams|runtime|engine(_memory)?)_test\\.cpp$")
set(device_objects "")
foreach(source IN LISTS device_tests ITEMS ${CMAKE_CURRENT_SOURCE_DIR}/cuda/main.cpp)
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_BINARY_DIR}/cuda_device/${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda_device
    COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${SHOAL_NVCC} -x cu -std=c++20 -O1 --expt-relaxed-constexpr -w -I${CMAKE_SOURCE_DIR}
            -DSHOAL_SOURCE_DIR="${CMAKE_SOURCE_DIR}" ${cuda_targets} -MD -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} DEPFILE ${object}.d COMMENT "nvcc ${name}.cpp" VERBATIM)
  list(APPEND device_objects ${object})
endforeach()
set_source_files_properties(${device_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
add_executable(cuda_device_test EXCLUDE_FROM_ALL device/no_emulator.cpp ${device_objects})
target_link_libraries(cuda_device_test PRIVATE test_support)
shoal_add_cuda(cuda_device_test)
